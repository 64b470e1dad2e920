"""``trainer.max_restarts`` on the command line: a small process that runs the training in another one and starts it again.

What kills the driver itself (the system when memory runs out, a crash in native code, a CUDA context that is lost) leaves nobody
in that process to start anything. The supervisor holds no model and no GPU. It passes signals on, counts attempts, and ends every
process that an attempt leaves behind before the next one begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.trainer.ending import ENDING_SIGNALS, Terminated
from burnish.trainer.restarts import HEARTBEAT, Failure, Restarts, WrittenSince
from burnish.trainer.supervised import STARTED, VARIABLE
from burnish.utils import env, local_paths, stacks
from burnish.utils.console import error_console
from burnish.utils.events import EventLog

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from burnish.utils.interrupts import end_at_ctrl_c
end_at_ctrl_c()
from MODULE import main
sys.exit(main(sys.argv[1:]))
"""
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SECONDS_BETWEEN_GLANCES = 0.2
_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_LEAVE = 10.0
"""That processes which an attempt has started have to end by themselves once it is over."""
_SECONDS_BEFORE_A_RESTART = 5.0


def supervise(
    argv: Sequence[str], config: PPOTrainerConfig | SFTTrainerConfig, *, module: str = "burnish.trainer.main_ppo"
) -> int:
    """Runs ``burnish train`` with the arguments ``argv`` until it ends well, or shall not be started again.

    Args:
        module: whose ``main`` takes the arguments.

    Returns:
        the exit status of the last attempt; 1 where a signal ended it.
    """
    return Supervisor(argv, config, module).run()


class Supervisor:
    """Attempts at one run, one after the other.

    Args:
        argv: arguments of ``burnish train``.
        config: what they say.
        module: whose ``main`` takes them.
    """

    def __init__(
        self,
        argv: Sequence[str],
        config: PPOTrainerConfig | SFTTrainerConfig,
        module: str = "burnish.trainer.main_ppo",
    ) -> None:
        self._argv = list(argv)
        self._program = _START.replace("MODULE", module)
        self._started = time.time()
        self._run_dir = local_paths.expanded(config.trainer.default_local_dir).absolute()
        self._events = EventLog(self._run_dir)
        self._restarts = Restarts(config.trainer.max_restarts)
        timeout = config.trainer.stage_timeout
        # The driver watches itself. Where not even its watching thread runs any more, its heartbeat stands still.
        self._longest_silence = None if timeout is None else 1.5 * timeout + 120
        self._child: subprocess.Popen[bytes] | None = None
        self._was_stopped = False

    def run(self) -> int:
        """See `supervise`."""
        written = WrittenSince(self._run_dir)
        _adopt_orphans()
        with self._passing_signals_on():
            while True:
                status, failure = self._attempt([] if not written else ["trainer.resume_mode=auto"])
                if failure is None:
                    return status
                _end_descendants(_SECONDS_TO_LEAVE)
                refusal = "It was asked to stop." if self._was_stopped else self._restarts.refusal(failure)
                if refusal is not None:
                    error_console.print(refusal, soft_wrap=True)
                    return max(status, 1)
                self._restarts.take(failure)
                number = f"{self._restarts.taken} of {self._restarts.allowed}"
                message = f"Started again ({number}) after: {failure.message}"
                self._events.write("restart", message, step=failure.step, stage=failure.stage)
                error_console.print(f"Starting again ({number}).", soft_wrap=True)
                time.sleep(_SECONDS_BEFORE_A_RESTART)

    def _attempt(self, more: list[str]) -> tuple[int, Failure | None]:
        """One attempt to its end: its exit status, and what it says went wrong."""
        reading, writing = os.pipe()
        started = time.time()
        with os.fdopen(reading, "rb") as pipe:
            try:
                child = self._child = subprocess.Popen(
                    [sys.executable, "-c", self._program, json.dumps(sys.path), *self._argv, *more],
                    pass_fds=[writing],
                    env=env.everything() | {VARIABLE: f"{os.getpid()}:{writing}", STARTED: str(self._started)},
                    # Of its own, so that Ctrl-C in a terminal comes once, from here.
                    process_group=0,
                )
            finally:
                os.close(writing)
            self._wait(child)
            # Others may hold the pipe's other end open; what the child said is there.
            os.set_blocking(pipe.fileno(), False)
            said = pipe.readline()
        status = child.returncode
        if said:
            return status, Failure(**json.loads(said))
        if status >= 0:
            return status, None
        if self._was_stopped and -status in ENDING_SIGNALS:
            # It was still loading what it needs, where a signal that was passed on simply ends it.
            error_console.print("Stopped before training began.")
            return 128 - status, None
        failure = self._killed(-status, started)
        error_console.print(failure.message, soft_wrap=True)
        self._events.write("worker_death", failure.message, step=failure.step, stage=failure.stage)
        return 1, failure

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        seen, since = None, time.monotonic()
        looked = since
        while child.poll() is None:
            # Not `wait`: that would let signals wait too.
            time.sleep(_SECONDS_BETWEEN_GLANCES)
            _reap_adopted(child.pid)
            now = time.monotonic()
            if self._longest_silence is None or now - looked < _SECONDS_BETWEEN_LOOKS:
                continue
            looked, sign = now, self._sign_of_life()
            if self._heartbeat().get("pid") != child.pid or sign != seen:
                seen, since = sign, now
            elif now - since > self._longest_silence:
                self._end_silent(child)

    def _end_silent(self, child: subprocess.Popen[bytes]) -> None:
        text = stacks.of_tree(child.pid) or ""
        where = f" Stacks: {stacks.write(self._run_dir / 'stacks', 'driver', text)}." if text else ""
        beat = self._heartbeat()
        message = (
            f"The driver's process {child.pid} has given no sign of life for {self._longest_silence:.0f} s in stage "
            f"{beat.get('stage')} (trainer.stage_timeout) and is ended.{where}"
        )
        error_console.print(message, soft_wrap=True)
        self._events.write("hang", message, step=beat.get("step"), stage=beat.get("stage"))
        child.kill()
        child.wait()

    def _heartbeat(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self._run_dir / HEARTBEAT).read_text(encoding="utf-8"))
        return {}

    def _sign_of_life(self) -> int | None:
        """When the heartbeat was written, or where the disk takes nothing more, would have been."""
        with contextlib.suppress(OSError):
            return (self._run_dir / HEARTBEAT).stat().st_mtime_ns
        return None

    def _killed(self, number: int, started: float) -> Failure:
        """A signal ended the driver, which could say nothing any more."""
        beat = self._heartbeat()
        if beat.get("time", 0.0) < started:
            beat = {}
        names = {one.value: one.name for one in signal.Signals}
        name = names.get(number, f"signal {number}")
        memory = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
        step, stage = beat.get("step", 0), beat.get("stage", "start")
        place = f"in step {step}" if step else "before the first step"
        return Failure(
            kind="worker_death",
            what=name,
            step=step,
            stage=stage,
            message=f"The driver's process was ended by {name}{memory}, {place} (stage: {stage}).",
            may_pass=True,
        )

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGUSR1:
                self._was_stopped = True
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)
            elif self._was_stopped:
                # Between two attempts there is nothing to save.
                raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

        before = {number: signal.getsignal(number) for number in _PASSED_ON}
        # What whoever started this has ignored stays so, as Ctrl-C in a shell's background.
        ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN and handler is not None]
        for number in ours:
            signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, before[number])


def _adopt_orphans() -> None:
    """Processes whose parent ends come to this one, so that none is lost sight of. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_adopted(but: int) -> None:
    """Takes note of adopted processes that have ended; whose end is of interest is left to its own wait."""
    for pid in _children():
        if pid != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def _end_descendants(patience: float) -> None:
    """Waits for the processes that an attempt has left, and kills those that stay."""
    deadline = time.monotonic() + patience
    while _children():
        _reap_adopted(0)
        if time.monotonic() > deadline:
            for pid in list(stacks.descendants(os.getpid())):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
