"""How often others may be asked: requests and tokens a minute, and how many requests at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_MINUTE = 60.0


class TokenBucket:
    """A bucket that refills at ``per_minute`` and holds ``capacity``; it is full at first.

    What is taken may exceed what is there: the taker then waits until the debt is paid, and those after him longer. In any
    span of T seconds at most ``capacity + per_minute * T / 60`` are spent (more only by one taking larger than
    ``capacity``).

    Args:
        now: seconds on the clock that `take` is told.
    """

    def __init__(self, per_minute: float, capacity: float, now: float) -> None:
        self._rate = per_minute / _MINUTE
        self._capacity = capacity
        self._level = capacity
        self._filled_at = now

    def take(self, amount: float, now: float) -> float:
        """Takes ``amount``, and returns the seconds to wait before it may be spent.

        A negative amount gives back what was taken and not spent.
        """
        filled = min(self._capacity, self._level + (now - self._filled_at) * self._rate)
        self._level = min(self._capacity, filled - amount)
        self._filled_at = now
        return max(0.0, -self._level / self._rate)


class RateLimiter:
    """Lets requests begin one by one, within the limits; first come, first served. For one event loop.

    Requests are spread evenly over the minute, never sent in bursts, since many servers count by the second.

    Args:
        max_concurrent: requests on their way at once.
        max_rpm: requests a minute; None: any number.
        max_tpm: tokens a minute; None: any number.
        tokens_per_request: what a request is expected to take, read and written.
        clock, sleep: the time.
    """

    def __init__(
        self,
        max_concurrent: int,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        tokens_per_request: float = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._free = asyncio.Semaphore(max_concurrent)
        self._clock, self._sleep = clock, sleep
        now = clock()
        self._tokens_per_request = tokens_per_request
        self._requests = TokenBucket(max_rpm, 1.0, now) if max_rpm else None
        self._tokens = TokenBucket(max_tpm, tokens_per_request, now) if max_tpm else None
        self._paused_until = now

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One request: the block begins when it may be sent and ends when it is answered."""
        async with self._free:
            await self._wait_for_turn()
            yield

    def pause(self, seconds: float) -> None:
        """Nothing begins for so long: the server asked for it."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def spent(self, num_tokens: float) -> None:
        """A request took ``num_tokens``, whatever was expected."""
        if self._tokens is not None:
            self._tokens.take(num_tokens - self._tokens_per_request, self._clock())

    async def _wait_for_turn(self) -> None:
        while True:
            now = self._clock()
            if (paused := self._paused_until - now) > 0:
                await self._sleep(paused)
                # A turn taken before the pause is over, so that those who waited do not all begin at its end.
                continue
            delays = [0.0]
            if self._requests is not None:
                delays.append(self._requests.take(1.0, now))
            if self._tokens is not None:
                delays.append(self._tokens.take(self._tokens_per_request, now))
            if (delay := max(delays)) > 0:
                await self._sleep(delay)
            if self._clock() >= self._paused_until:
                return
