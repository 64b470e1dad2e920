"""Calls of a reward function that asks a service with limits: when each may begin, and which is made again."""

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from burnish.config.reward import RewardConfig
from burnish.reward.async_scorer import AsyncScorer, Row
from burnish.reward.http import LONGEST_WAIT_S, PASSING_STATUSES, backoff, seconds_to_wait
from burnish.reward.outcome import Outcome, one_line
from burnish.reward.pool import RewardPool
from burnish.reward.rate_limit import RateLimiter
from burnish.reward.scorers import num_processes
from burnish.reward.travel import is_async

T = TypeVar("T")

# Exceptions of clients (OpenAI's and those made like it), which are not imported here.
_PASSING_NAMES = frozenset(
    {"RateLimitError", "APIConnectionError", "APITimeoutError", "InternalServerError", "ServiceUnavailableError"}
)


@dataclass(frozen=True)
class Again:
    """A call that failed for a reason that passes: what it raised, and the seconds that the service asks to wait."""

    error: str
    traceback: str
    retry_after: float | None


class Attempt:
    """A reward function that returns `Again` where what it raises is worth another call; it travels into processes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_async = is_async(function)

    def __call__(self, **row: Any) -> Any:
        """What the function returns, `Again`, or what to await for one of these."""
        try:
            value = self._function(**row)
        except Exception as error:  # noqa: BLE001  the user's function may raise anything; what does not pass is raised on
            return _again(error)
        return self._wait_for(value) if inspect.isawaitable(value) else value

    async def _wait_for(self, value: Any) -> Any:
        try:
            return await value
        except Exception as error:  # noqa: BLE001  the user's function may raise anything; what does not pass is raised on
            return _again(error)


class LimitedScorer(AsyncScorer):
    """Calls ``function`` in processes, each call when ``config.rate_limit`` lets it begin.

    Args:
        num_sharing: processes that score at the same time, each with its part of the limits.
    """

    def __init__(self, function: Callable[..., Any], config: RewardConfig, *, num_sharing: int = 1) -> None:
        super().__init__(self._score_one, rows_per_call=1, max_calls=None)
        self._limits = limits = config.rate_limit
        most_at_once = math.ceil(limits.max_concurrent / num_sharing)
        # One process is enough for what waits in an event loop.
        workers = min(num_processes(config, function), most_at_once)
        self._pool = RewardPool(
            Attempt(function),
            num_workers=1 if is_async(function) and config.num_workers == "auto" else workers,
            timeout=limits.timeout,
            memory_limit_mb=config.memory_limit_mb,
            concurrency=most_at_once,
            timeout_key="reward.rate_limit.timeout",
        )
        self._limiter = RateLimiter(
            most_at_once,
            limits.max_rpm / num_sharing if limits.max_rpm else None,
            limits.max_tpm / num_sharing if limits.max_tpm else None,
            limits.estimated_tokens_per_request,
        )
        self._ready: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Ends the processes; rows on their way fail."""
        self._pool.close()
        super().close()

    async def _score_one(self, rows: list[Row]) -> list[Outcome]:
        (row,) = rows
        if self._ready is None:
            self._ready = self._loop.create_task(_in_thread(self._pool.wait_until_ready))
        # Calls must not gather while processes start, to begin all together then.
        await asyncio.shield(self._ready)
        for attempt in range(1, self._limits.max_attempts + 1):
            async with self._limiter.request():
                outcome = await self._call_in_process(row)
                if isinstance(outcome.value, dict) and isinstance(outcome.value.get("num_request_tokens"), int | float):
                    self._limiter.spent(outcome.value["num_request_tokens"])
            again = outcome.value
            if not isinstance(again, Again):
                return [outcome]
            hopeless = again.retry_after is not None and again.retry_after > LONGEST_WAIT_S
            if attempt == self._limits.max_attempts or hopeless:
                break
            if again.retry_after:
                self._limiter.pause(again.retry_after)
            await asyncio.sleep(backoff(self._limits.retry_delay, attempt))
        said = again.error if attempt == 1 else f"{again.error} (It was called {attempt} times.)"
        return [replace(outcome, value=None, error=said, traceback=again.traceback, kind="raised")]

    async def _call_in_process(self, row: Row) -> Outcome:
        """The outcome of one call in a process."""
        key = object()
        self._pool.submit(key, row)
        return (await _in_thread(lambda: self._pool.collect([key])))[key]


async def _in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns, done in a thread that does not keep the program from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            value, error = work(), None
        except Exception as raised:  # noqa: BLE001  raised again where it is waited for
            value, error = None, raised
        loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="reward call", daemon=True).start()
    return await done


def _again(error: Exception) -> Again:
    """What the function raised, where another call may do better.

    Raises:
        Exception: ``error`` itself, where it will not.
    """
    if not _is_passing(error):
        raise error
    said = getattr(error, "retry_after", None)
    if said is None:
        said = seconds_to_wait(getattr(getattr(error, "response", None), "headers", None) or {})
    retry_after = float(said) if isinstance(said, int | float) and math.isfinite(said) and said >= 0 else None
    return Again(one_line(error), "".join(traceback.format_exception(error)), retry_after)


def _is_passing(error: Exception) -> bool:
    declared = getattr(error, "is_passing", None)
    if isinstance(declared, bool):
        return declared
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in PASSING_STATUSES
    names = {cls.__name__ for cls in type(error).__mro__}
    # The last two are httpx's for connections, and requests' for everything that went wrong on the way.
    return isinstance(error, ConnectionError | TimeoutError) or bool(
        names & (_PASSING_NAMES | {"TransportError", "ConnectionError", "Timeout"})
    )
