"""Looks after a run from a thread of its own: writes ``heartbeat.json``, warns when nothing gets further, and ends what hangs.

A stage gets further when the trainer goes to the next one, or when any process of the run calls `burnish.utils.progress.tick`.
Calls of workers have the limit of their groups, which name the silent rank; this thread has the last word, also over stages that
run in the driver, as rewards, and over native code of the driver's own process, which no exception reaches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from burnish.single_controller.heartbeat import Beat
from burnish.trainer.restarts import HEARTBEAT, failure_of
from burnish.trainer.supervised import report_failure
from burnish.utils import progress, stacks
from burnish.utils.console import error_console
from burnish.utils.errors import StalledError, WorkerDiedError
from burnish.utils.events import EventLog

if TYPE_CHECKING:
    from burnish.trainer.loop import TrainingLoop
    from burnish.trainer.own_ray import OwnRay

logger = logging.getLogger("burnish.trainer")

_SECONDS_BETWEEN_GLANCES = 0.05
"""At the stage alone: a process that is killed has left behind in which one it was."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_LOOKS_AT_RAY = 0.2
_SECONDS_BETWEEN_WRITES = 2.0
_WARNS_AFTER = 600.0
"""Where there is no time limit."""
_SECONDS_TO_START = 900.0
_MOST_GRACE = 60.0
# Next to nothing uses it; SIGALRM is taken by the local controller, and by reward functions that limit their time.
_INTERRUPT = signal.SIGVTALRM


class RunWatch:
    """Watches a trainer while the block runs. In a thread that is not the main one it warns, and ends nothing.

    Args:
        trainer: its ``current_stage``, ``global_steps`` and ``worker_groups`` are read.
        run_dir: where heartbeat and stacks are written.
        events: is told of stalls.
        timeout: seconds without any progress that end the run; None: never.
    """

    def __init__(self, trainer: TrainingLoop, run_dir: Path, events: EventLog, timeout: float | None) -> None:
        self._trainer, self._run_dir, self._events, self._timeout = trainer, run_dir, events, timeout
        self._period = min(_SECONDS_BETWEEN_LOOKS, (timeout or _WARNS_AFTER) / 4)
        # Whoever waits for a worker's call notices first, and says more.
        self._grace = min(_MOST_GRACE, (timeout or 0) / 2) + self._period
        self._is_ending = False
        self._place: tuple[Any, ...] = ()
        self._since, self._moved = time.time(), time.monotonic()
        self._looked = self._moved
        self._written = float("-inf")
        self._warned = False
        self._interrupted: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="run-watch")
        self._main = threading.main_thread() if threading.current_thread() is threading.main_thread() else None

    def __enter__(self) -> Self:
        stacks.make_visible()
        if self._main is not None:
            self._before = signal.signal(_INTERRUPT, self._interrupt)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._main is not None:
            signal.signal(_INTERRUPT, self._before)
        self._write_heartbeat("ended")

    def looks_at(self, ray: OwnRay) -> None:
        """From here on the run ends when this Ray is lost, for which Ray's own calls would wait in vain."""
        if ray.has_head:
            # A thread of its own: the other one asks Ray for beats, and would wait too.
            threading.Thread(target=self._watch_ray, args=(ray,), daemon=True, name="ray-watch").start()

    def _watch_ray(self, ray: OwnRay) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS_AT_RAY):
            if (lost := ray.lost()) is not None:
                self._end_process(WorkerDiedError(f"{lost} The run is ended in {self._where}."))

    def ending(self) -> None:
        """From here on the run is being shut down, a stage like any other."""
        self._is_ending = True
        self._interrupted = None
        progress.tick()

    @property
    def _stage(self) -> str:
        return "shutdown" if self._is_ending else self._trainer.current_stage

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_GLANCES):
            now = time.monotonic()
            place = (self._trainer.global_steps, self._stage)
            if place != self._place:
                self._place, self._since, self._moved, self._interrupted = place, time.time(), now, None
                self._written = float("-inf")
            if now - self._written >= _SECONDS_BETWEEN_WRITES:
                self._write_heartbeat()
                self._written = now
            if now - self._looked >= self._period:
                if now - self._looked > 5 * self._period + 5:
                    self._moved = now  # The whole process stood still, as after Ctrl-Z.
                self._looked = now
                self._look(now)

    def _look(self, now: float) -> None:
        idle = self._idle_seconds(now)
        if idle < self._warn_after:
            self._warned, self._interrupted = False, None
        elif not self._warned:
            self._warned = True
            self._warn(idle)
        if self._limit is None or self._main is None or idle < self._limit + self._grace:
            return
        if self._interrupted is None:
            self._interrupted = now
            signal.pthread_kill(self._main.ident or 0, _INTERRUPT)
        elif now - self._interrupted > max(5.0, self._grace):
            self._give_up()

    @property
    def _limit(self) -> float | None:
        """Processes that start and models that load tell nothing of how far they are; groups limit their own start."""
        if self._timeout is not None and self._trainer.current_stage == "start":
            return max(self._timeout, _SECONDS_TO_START)
        return self._timeout

    @property
    def _warn_after(self) -> float:
        return _WARNS_AFTER if self._limit is None else self._limit / 3

    def _idle_seconds(self, now: float) -> float:
        known = [now - self._moved, progress.idle_seconds()]
        known += [idle for group in self._groups() if (idle := group.idle_seconds()) is not None]
        return min(known)

    def _groups(self) -> list[Any]:
        return list(self._trainer.worker_groups.values())

    def _beats(self) -> dict[str, Beat]:
        return {name: beat for group in self._groups() for name, beat in group.beats().items()}

    def _write_heartbeat(self, stage: str | None = None) -> None:
        step = self._trainer.global_steps
        said = {
            "time": time.time(),
            "pid": os.getpid(),
            "step": step,
            "total_steps": self._trainer.total_training_steps,
            "stage": stage or self._stage,
            "since": self._since,
            "workers": {
                name: {"stage": beat.stage, "since": beat.since, "pid": beat.pid, "node": beat.node}
                for name, beat in self._beats().items()
            },
        }
        file = self._run_dir / HEARTBEAT
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{HEARTBEAT}.tmp")
            temporary.write_text(json.dumps(said), encoding="utf-8")
            os.replace(temporary, file)
        except OSError:
            # A full disk is found, and said, by those whose files matter. That this process lives is seen by the file's time.
            with contextlib.suppress(OSError):
                os.utime(file)

    # --------------------------------------------------------------------------------------------- what hangs

    def _warn(self, idle: float) -> None:
        files = self._dump()
        busy = ", ".join(f"{name}: {beat.stage}" for name, beat in self._beats().items())
        limit = "" if self._limit is None else f" At {self._limit:g} s it is ended (trainer.stage_timeout)."
        message = (
            f"Nothing has got further for {idle:.0f} s in {self._where}{f' ({busy})' if busy else ''}. Stacks: "
            f"{', '.join(map(str, files))}.{limit}"
        )
        logger.warning("%s", message)
        self._events.write("warning", message, step=self._trainer.global_steps, stage=self._stage, idle_seconds=idle)

    @property
    def _where(self) -> str:
        step = self._trainer.global_steps
        return f"stage {self._stage}" + (f" of step {step}" if step else "")

    def _dump(self) -> list[Path]:
        """The stacks of every process of the run, the driver's and its children's first."""
        folder = self._run_dir / "stacks"
        text = stacks.of_tree(os.getpid()) or stacks.of_this_process()
        files = [stacks.write(folder, "driver", text)]
        seen: set[str] = set()
        for group in self._groups():
            beats = group.beats()
            is_driver = beats and all(beat.pid == os.getpid() for beat in beats.values())
            # Several roles may share their processes.
            if not is_driver and not (beats and beats.keys() <= seen):
                files += group.dump_stacks().values()
            seen |= beats.keys()
        return files

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        """On the main thread, at the next line of Python that it runs."""
        where = f" It stands at {stacks.place(frame)}." if frame is not None else ""
        files = self._dump()
        raise StalledError(
            f"The driver got no further in {self._where} for {self._limit:g} s (trainer.stage_timeout).{where} Stacks: "
            f"{', '.join(map(str, files))}."
        )

    def _give_up(self) -> NoReturn:
        """The main thread does not answer: the process ends at once, with all that it has started."""
        text = stacks.of_this_process()
        file = stacks.write(self._run_dir / "stacks", "driver", text)
        message = (
            f"The driver got no further in {self._where} for {self._limit:g} s (trainer.stage_timeout), and does not "
            f"answer: it stands at {stacks.innermost(text)}. Stacks: {file}. The process is ended."
        )
        self._end_process(StalledError(message))

    def _end_process(self, error: StalledError | WorkerDiedError) -> NoReturn:
        """Ends this process at once, with all that it has started."""
        error_console.print(f"{type(error).__name__}: {error}", soft_wrap=True)
        failure = failure_of(error, step=self._trainer.global_steps, stage=self._stage)
        self._events.write(failure.kind, failure.message, step=failure.step, stage=failure.stage)
        # A supervisor starts the run again, as after a failure that an exception could tell.
        report_failure(failure)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for pid in list(stacks.descendants(os.getpid())):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)
