"""A pool of processes that call a reward function, so that one that hangs or crashes costs its row only."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self

from burnish.reward.outcome import Outcome, one_line
from burnish.reward.supervisor import Settings, Supervisor
from burnish.reward.travel import describe, pack
from burnish.utils.errors import RewardError

__all__ = ["Outcome", "RewardPool"]


class RewardPool:
    """Calls ``function(**row)`` in processes of its own, started fresh, which end with this object at the latest.

    A synchronous function runs on the main thread of its process, one row after the other; an asynchronous one runs for
    up to ``concurrency`` rows of its process at once, in one event loop. A row that takes longer than ``timeout``, or
    takes its process down, gets an outcome that says so; the process is replaced, together with all that it started, and
    the other rows are scored elsewhere. Where an asynchronous function blocks its loop or takes the process down, the
    rows that ran there are repeated one by one, to find the one that did it.

    Args:
        function: takes the keywords of the rows; see `burnish.reward.travel.pack` for what can travel.
        num_workers: processes.
        timeout: seconds that a row may take from when it starts; None for ever.
        memory_limit_mb: memory that a process may write to, in MiB; beyond it Python raises MemoryError.
        concurrency: rows that an asynchronous function runs for at once, in one process.
        start_timeout: seconds in which a process must have loaded the function.
        timeout_key: the configuration key of the time limit, for messages.

    Raises:
        ConfigError: the function cannot travel.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        num_workers: int,
        timeout: float | None = 60.0,
        memory_limit_mb: int | None = None,
        concurrency: int = 64,
        start_timeout: float = 600.0,
        timeout_key: str = "reward.timeout",
    ) -> None:
        self.settings = Settings(
            function=pack(function),
            name=describe(function),
            num_workers=num_workers,
            timeout=timeout,
            memory_limit_mb=memory_limit_mb,
            concurrency=concurrency,
            start_timeout=start_timeout,
            timeout_key=timeout_key,
        )
        self._supervisor = Supervisor(self.settings)
        # Not __del__: this also runs when the interpreter ends.
        self._end = weakref.finalize(self, Supervisor.close, self._supervisor)

    def wait_until_ready(self) -> None:
        """Returns when a process has loaded the function.

        Raises:
            RewardError: none can; with the traceback.
        """
        supervisor = self._supervisor
        with supervisor.changed:
            supervisor.changed.wait_for(lambda: supervisor.started or supervisor.failure or supervisor.closed)
            self._check_alive()

    def submit(self, key: Hashable, row: dict[str, Any]) -> None:
        """Scores ``row`` as soon as a process is free. From any thread.

        Raises:
            RewardError: the pool is closed, no process can start, or a row of that key is on its way already.
        """
        supervisor = self._supervisor
        with supervisor.changed:
            self._check_alive()
            if key in supervisor.pending:
                raise RewardError(f"The reward of {key!r} is being computed already; keys must differ.")
        supervisor.submit(key, _as_bytes(row))

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        """The outcomes of rows that were submitted, by key; waits for them. Each is given out once.

        Raises:
            RewardError: a key that was not submitted, a pool that is closed meanwhile, or no process can start.
        """
        keys, supervisor = list(keys), self._supervisor
        with supervisor.changed:
            for key in keys:
                if key not in supervisor.pending:
                    raise RewardError(f"No row was submitted under {key!r}, or its outcome was collected already.")
            for key in keys:
                while key not in supervisor.outcomes:
                    self._check_alive()
                    supervisor.changed.wait()
            supervisor.pending.difference_update(keys)
            return {key: supervisor.outcomes.pop(key) for key in keys}

    def score(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """The outcomes of ``rows``, in their order."""
        keys = [object() for _ in rows]
        for key, row in zip(keys, rows, strict=True):
            self.submit(key, row)
        outcomes = self.collect(keys)
        return [outcomes[key] for key in keys]

    def close(self) -> None:
        """Ends the processes and all that they started. A second time does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if self._supervisor.failure is not None:
            error, trace = self._supervisor.failure
            raise RewardError(
                f"The reward function {self.settings.name} cannot be used in a reward process: {error}." + _below(trace)
            )
        if self._supervisor.closed:
            raise RewardError("The reward pool is closed.")


def _as_bytes(row: dict[str, Any]) -> bytes | Outcome:
    try:
        return pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  objects of others, whose pickling may raise anything
        return Outcome(error=f"RewardError: the row cannot be sent to a process: {one_line(error)}", kind="raised")


def _below(trace: str) -> str:
    return f"\n{trace.rstrip()}" if trace else ""
