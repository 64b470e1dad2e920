"""From a step's metrics to all loggers of a run, none of which may hold it up or end it."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from burnish.utils.errors import ConfigError
from burnish.utils.events import EventLog
from burnish.utils.foreign_code import Caught, told
from burnish.utils.secrets import redact_text
from burnish.utils.tracking.base import LOGGERS, Logger, RunInfo
from burnish.utils.tracking.values import NumbersOnly

ALWAYS = "file"
"""The logger that every run has, whatever ``trainer.logger`` names: resuming, reports and help build on it."""
FINISH_SECONDS = 120.0
"""How long the end of a run waits for services that do not answer."""
# Steps that a service may be behind.
_MOST_WAITING = 1000
_OVER = "over"

logger = logging.getLogger("burnish.tracking")


class Tracking:
    """Sends the metrics of every step to all loggers of a run.

    Loggers that only write a line are called in turn. Every other one has a thread of its own, so that neither its work nor
    its network is part of a step. A logger that raises is told of, is an event, and is switched off; the others go on.

    Args:
        project_name: groups experiments, where a logger knows that.
        experiment_name: of this run.
        backends: names of loggers, or ``package.module:attribute`` of a callable ``RunInfo -> Logger``; ``file`` is always
            among them.
        run_dir: folder of the run, made if missing.
        config: the configuration, a mapping or a dataclass, for loggers that show it; its secrets are hidden.
        resumed_step: the step that the run goes on from; 0: it starts afresh, and an older log in the folder is set aside.
        events: is told when a logger fails.

    Raises:
        ConfigError: no such logger, its package is not installed, or it cannot start; nothing is left open then.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: Sequence[str] | str,
        run_dir: str | os.PathLike,
        config: Any = None,
        resumed_step: int = 0,
        events: EventLog | None = None,
    ) -> None:
        names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends))
        if ALWAYS not in names:
            # Before the services: it is there when one of them cannot start.
            names.insert(0, ALWAYS)
        makers = [LOGGERS.get(name) for name in names]
        info = RunInfo(project_name, experiment_name, Path(run_dir), config, resumed_step)
        info.run_dir.mkdir(parents=True, exist_ok=True)
        self._numbers = NumbersOnly()
        self._events = events
        self._sinks: list[_Sink] = []
        try:
            for name, make in zip(names, makers, strict=True):
                self._sinks.append(_Sink(name, make, info, self._tell))
        except BaseException:
            self.finish()
            raise

    @property
    def loggers(self) -> list[Logger]:
        """The loggers, also those that were switched off."""
        return [sink.logger for sink in self._sinks]

    def log(self, data: Mapping[str, Any], step: int, *, partial: bool = False) -> None:
        """Records metrics: numbers, or arrays or tensors of one; what is none is left out and counted.

        Args:
            partial: the step has failed, and may be run again: it is not sent to services, which take a step once.
        """
        numbers = self._numbers(data)
        for sink in self._sinks:
            sink.call("log_partial" if partial else "log", numbers, step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Shows a validation's responses where a logger has tables or texts."""
        for sink in self._sinks:
            sink.call("log_generations", rows, step)

    def finish(self) -> None:
        """Waits for what is under way and closes every logger, also when one of them fails; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        deadline = time.monotonic() + FINISH_SECONDS
        for sink in sinks:
            sink.wait(deadline)

    def _tell(self, message: str, step: int | None) -> None:
        logger.warning("%s", message)
        if self._events is not None:
            self._events.write("warning", message, step=step)


class _Sink:
    """One logger, called in turn or from a thread of its own, and switched off by its first error.

    The thread also makes and closes it: packages remember who made them, and some put handlers of their own on the signals of
    the main thread, which are the trainer's.
    """

    def __init__(
        self, name: str, make: Callable[[RunInfo], Logger], info: RunInfo, tell: Callable[[str, int | None], None]
    ) -> None:
        self.name = name
        self._tell = tell
        self._is_off = False
        self._is_late = False
        self._queue: queue.Queue[tuple[Any, ...]] | None = None
        self._thread: threading.Thread | None = None
        if getattr(make, "in_turn", False):
            self.logger = self._start(make, info)
            return
        started: Future[Logger] = Future()
        self._queue = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(
            target=self._run, args=(make, info, started), name=f"logger {name}", daemon=True
        )
        self._thread.start()
        self.logger = started.result()

    def _start(self, make: Callable[[RunInfo], Logger], info: RunInfo) -> Logger:
        with Caught() as caught:
            return make(info)
        if isinstance(caught.error, ConfigError):
            raise caught.error
        assert caught.error is not None
        raise ConfigError(
            f"trainer.logger names {self.name}, which cannot start: {redact_text(told(caught.error))}. Set it up, or leave it "
            f"out: metrics are always in the run's folder."
        ) from caught.error

    def call(self, method: str, data: Any, step: int) -> None:
        """Calls ``method(data, step)`` of the logger, if it has one."""
        if self._is_off or not hasattr(self.logger, method):
            return
        if self._queue is None:
            self._guarded(method, data, step)
            return
        try:
            self._queue.put_nowait((method, data, step))
            self._is_late = False
        except queue.Full:
            if not self._is_late:
                self._is_late = True
                self._tell(f"The logger {self.name} is {_MOST_WAITING} steps behind: it misses step {step} on.", step)

    def _run(self, make: Callable[[RunInfo], Logger], info: RunInfo, started: "Future[Logger]") -> None:
        assert self._queue is not None
        try:
            started.set_result(self._start(make, info))
        except BaseException as error:  # noqa: BLE001  Raised by who waits for the start.
            started.set_exception(error)
            return
        while True:
            method, *arguments = self._queue.get()
            if method == _OVER:
                self._finish()
                return
            if not self._is_off:
                self._guarded(method, *arguments)

    def _guarded(self, method: str, data: Any, step: int) -> None:
        with Caught() as caught:
            getattr(self.logger, method)(data, step)
        if caught.error is None:
            return
        cause = redact_text(told(caught.error))
        if method == "log_generations":
            # A table is for looking at; the curves are worth more than an argument about it.
            self._tell(f"The logger {self.name} does not show the responses of step {step}: {cause}.", step)
            return
        self._is_off = True
        self._tell(
            f"The logger {self.name} failed at step {step} and is switched off for the rest of the run: {cause}. The others go "
            f"on.",
            step,
        )

    def _finish(self) -> None:
        with Caught() as caught:
            self.logger.finish()
        if caught.error is not None:
            self._tell(f"The logger {self.name} did not close well: {redact_text(told(caught.error))}.", None)

    def close(self) -> None:
        """Lets the logger finish, behind what is under way."""
        if self._queue is None:
            self._finish()
        else:
            # The queue may be full for a service that does not answer; `wait` has an end.
            threading.Thread(target=self._queue.put, args=((_OVER,),), daemon=True).start()

    def wait(self, deadline: float) -> None:
        """Returns when the logger is closed, or at ``deadline``."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(
                f"The logger {self.name} is not done after {FINISH_SECONDS:g} s and is left behind; it may lack the last steps.",
                None,
            )
