"""Whether the processes of an engine live, what they died of, and waiting for them that ends when they do."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from burnish.rollout.vllm.engine_log import EngineLog
from burnish.rollout.vllm.failures import death
from burnish.utils import progress
from burnish.utils.errors import RolloutError

GLANCE_S = 0.05
"""How often the processes are looked at while something is waited for."""
_KEY = "actor_rollout_ref.rollout.engine_timeout"
# vLLM's words around what went wrong in a worker.
_AROUND = re.compile(
    r"^(Call to \w+ method failed: )?(Worker failed with error ['\"])?(.*?)(['\"], please check the stack trace.*)?$",
    re.S,
)


class EngineWatch:
    """Watches one engine.

    Args:
        log: what its processes print; None where nobody reads that.
        timeout: seconds after which one that does not answer counts as dead.
    """

    def __init__(self, log: EngineLog | None, timeout: float) -> None:
        self.dead: str | None = None
        """What the engine died of; None: it lives."""
        self._log, self._timeout = log, timeout
        self._processes: Sequence[Any] = ()
        self._reports_failure: Callable[[], bool] = lambda: False

    def begin(self, processes: Sequence[Any], reports_failure: Callable[[], bool]) -> None:
        """The engine has started.

        Args:
            processes: its processes, as ``multiprocessing`` has them.
            reports_failure: whether vLLM itself says that it is dead.
        """
        self._processes, self._reports_failure = processes, reports_failure

    def check(self) -> None:
        """Raises the death of the engine.

        Raises:
            RolloutError: it is dead.
        """
        if self.dead is None:
            gone = [process for process in self._processes if process.exitcode is not None]
            if gone or self._reports_failure():
                self.dead = self._death(gone[0] if gone else self._ending())
        if self.dead is not None:
            raise RolloutError(
                f"The vLLM engine is gone: {self.dead}. The responses that it was sampling are lost; a new engine can be made, "
                f"and a run goes on from its last checkpoint."
            )

    def wait(self, future: concurrent.futures.Future[Any]) -> Any:
        """The result of what the engine was asked for.

        Raises:
            RolloutError: what went wrong there; the engine is dead, or did not answer in time.
        """
        deadline = time.monotonic() + self._timeout
        while not concurrent.futures.wait([future], timeout=GLANCE_S).done:
            self.check()
            if time.monotonic() > deadline:
                future.cancel()
                self.end_hanging()
        try:
            return future.result()
        except Exception as error:
            raise self.named(error) from error

    def named(self, error: Exception) -> Exception:
        """What went wrong in the engine, in its own words; its death where that is the reason."""
        if isinstance(error, RolloutError):
            return error
        if type(error).__name__ == "EngineDeadError" or self._reports_failure():
            try:
                self.check()
            except RolloutError as death:
                return death
        said = error if str(error) or error.__cause__ is None else error.__cause__
        match = _AROUND.match(str(said).strip())
        text = match.group(3).strip() if match else ""
        return RolloutError(text or f"The vLLM engine failed: {said!r}")

    def end_hanging(self) -> None:
        """Ends an engine that gives no answer.

        Raises:
            RolloutError: always.
        """
        self.dead = f"it gave no answer for {self._timeout:g} s and was ended; if it was only slow, raise {_KEY}"
        for process in self._processes:
            process.kill()
        self.check()

    def _ending(self) -> Any:
        """The process that ended; None where none does. vLLM may tell of it before it can be waited for."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for process in self._processes:
                if process.exitcode is not None:
                    return process
            time.sleep(0.02)
        return None

    def _death(self, process: Any) -> str:
        if process is None:
            return self._with_cause("it reported a failure and stopped")
        code = process.exitcode
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += ", as from the kernel when memory runs out, or by hand"
        return self._with_cause(f"its process {process.pid} ({process.name}) ended with {how}")

    def _with_cause(self, how: str) -> str:
        return how if self._log is None else death(how, self._log.lines())


class Heartbeat:
    """Asks an engine from time to time whether it lives, while nothing comes from it.

    Args:
        ask: begins to ask it something that it answers between two steps.
        timeout: seconds that it has to answer.
    """

    def __init__(self, watch: EngineWatch, ask: Callable[[], concurrent.futures.Future[Any]], timeout: float) -> None:
        self._watch, self._ask, self._timeout = watch, ask, timeout
        self._asked: concurrent.futures.Future[Any] | None = None
        self._since = self._asked_at = time.monotonic()

    def beat(self) -> None:
        """Something came from the engine."""
        progress.tick()
        self._since, self._asked = time.monotonic(), None

    def check(self) -> None:
        """Nothing came.

        Raises:
            RolloutError: for too long.
        """
        quiet = time.monotonic() - self._since
        if self._asked is not None and self._asked.done():
            self._watch.wait(self._asked)
            self.beat()
        elif self._asked is None and quiet > self._timeout / 4:
            self._asked, self._asked_at = self._ask(), time.monotonic()
        # From when it was asked: nobody looked while generating was paused, or while a caller took long with a response.
        elif self._asked is not None and time.monotonic() - self._asked_at > 0.75 * self._timeout:
            self._watch.end_hanging()
