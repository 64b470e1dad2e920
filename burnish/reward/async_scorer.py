"""Scores that are asked from others: rows wait in one queue, and several travel together."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from burnish.reward.background import background_loop
from burnish.reward.outcome import Outcome, one_line
from burnish.utils import progress
from burnish.utils.errors import RewardError

Row = dict[str, Any]


class AsyncScorer:
    """Scores rows by a coroutine function, in the background: `submit` begins, `collect` waits. Any thread may call it.

    Rows that wait while all calls are on their way travel together in the next one, up to ``rows_per_call``: while
    responses come in one by one each goes at once, and a whole batch is cut into few requests.

    Args:
        score: the outcomes of some rows, in their order. What it raises is the outcome of each of them.
        rows_per_call: rows that one call takes, at most.
        max_calls: calls on their way at once; None: any number.
    """

    def __init__(
        self, score: Callable[[list[Row]], Awaitable[list[Outcome]]], *, rows_per_call: int, max_calls: int | None
    ) -> None:
        self._score, self._rows_per_call, self._max_calls = score, rows_per_call, max_calls
        self._loop = background_loop()
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[Outcome]] = {}
        # Of the loop's thread alone:
        self._waiting: deque[tuple[Row, Future[Outcome]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    def submit(self, key: Hashable, row: Row) -> None:
        """Begins to score ``row``; `collect` gives the outcome under ``key``."""
        self._submit_all([(key, row)])

    def collect(self, keys: Iterable[Hashable]) -> dict[Hashable, Outcome]:
        """The outcomes of these rows, once there; waits for them.

        Raises:
            RewardError: nothing was submitted under a key, or it was collected already.
        """
        keys = list(keys)
        with self._lock:
            for key in keys:
                if key not in self._futures:
                    raise RewardError(f"No row was submitted under {key!r}, or its outcome was collected already.")
            futures = {key: self._futures.pop(key) for key in keys}
        return {key: future.result() for key, future in futures.items()}

    def score(self, rows: Sequence[Row]) -> list[Outcome]:
        """The outcomes of ``rows``, in their order."""
        keys = [object() for _ in rows]
        self._submit_all(list(zip(keys, rows, strict=True)))
        outcomes = self.collect(keys)
        return [outcomes[key] for key in keys]

    def close(self) -> None:
        """Nothing more is asked; rows on their way fail."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    def _submit_all(self, rows: list[tuple[Hashable, Row]]) -> None:
        waiting = []
        with self._lock:
            for key, row in rows:
                if key in self._futures:
                    raise RewardError(f"A row was submitted under the key {key!r} already, and not collected yet.")
                self._futures[key] = Future()
                waiting.append((row, self._futures[key]))
        self._loop.call_soon_threadsafe(self._enqueue, waiting)

    def _enqueue(self, rows: list[tuple[Row, Future[Outcome]]]) -> None:
        self._waiting.extend(rows)
        self._begin_calls()

    def _begin_calls(self) -> None:
        while self._waiting and (self._max_calls is None or len(self._calls) < self._max_calls):
            group = [self._waiting.popleft() for _ in range(min(self._rows_per_call, len(self._waiting)))]
            call = self._loop.create_task(self._call(group))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._begin_calls()

    async def _call(self, group: list[tuple[Row, Future[Outcome]]]) -> None:
        started = time.perf_counter()
        try:
            outcomes = await self._score([row for row, _ in group])
            if len(outcomes) != len(group):
                raise RewardError(f"{len(outcomes)} outcomes for {len(group)} rows.")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  counted as these rows' own failure
            seconds = time.perf_counter() - started
            outcomes = [Outcome(kind="raised", error=one_line(error), seconds=seconds)] * len(group)
        progress.tick()
        for (_, future), outcome in zip(group, outcomes, strict=True):
            future.set_result(outcome)

    async def _stop(self) -> None:
        while self._waiting:
            self._waiting.popleft()[1].set_result(Outcome(kind="raised", error="RewardError: the scorer was closed."))
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
