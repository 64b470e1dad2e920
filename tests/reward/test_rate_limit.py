import asyncio
import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.reward.rate_limit import RateLimiter, TokenBucket


class FakeTime:
    """Seconds that pass only while everyone sleeps."""

    def __init__(self):
        self.now = 0.0
        self._sleeping = []
        self._order = itertools.count()

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._order), woken))
        await woken

    async def run(self, work):
        """Runs ``work`` to its end, by letting the time pass to the next one who wakes."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(12):  # Everyone goes as far as he can at this time.
                await asyncio.sleep(0)
            if task.done():
                break
            self.now, _, woken = heapq.heappop(self._sleeping)
            if not woken.done():
                woken.set_result(None)
        return task.result()


def begins(limits, durations, arrivals=None, during=None):
    """When each request began, at which times how many were on their way, and when all was over."""
    time = FakeTime()
    began, at_once = [None] * len(durations), [0, 0]

    async def one(i, limiter):
        if arrivals:
            await time.sleep(arrivals[i])
        async with limiter.request():
            began[i] = time.now
            at_once[0] += 1
            at_once[1] = max(at_once)
            if during:
                during(i, limiter)
            await time.sleep(durations[i])
            at_once[0] -= 1

    async def everyone():
        limiter = RateLimiter(**limits, clock=time, sleep=time.sleep)
        await asyncio.gather(*(one(i, limiter) for i in range(len(durations))))

    async def run():
        await time.run(everyone())

    asyncio.run(run())
    return began, at_once[1]


@settings(deadline=None, max_examples=60)
@given(
    durations=st.lists(st.floats(0, 30), min_size=1, max_size=30),
    arrivals=st.lists(st.floats(0, 40), min_size=30, max_size=30),
    max_rpm=st.integers(1, 200),
    max_tpm=st.integers(100, 20000),
    tokens=st.integers(0, 3000),
    max_concurrent=st.integers(1, 6),
)
def test_no_limit_is_ever_broken_and_everyone_gets_his_turn(
    durations, arrivals, max_rpm, max_tpm, tokens, max_concurrent
):
    limits = {"max_concurrent": max_concurrent, "max_rpm": max_rpm, "max_tpm": max_tpm, "tokens_per_request": tokens}
    began, most = begins(limits, durations, arrivals)
    assert most <= max_concurrent
    began.sort()
    assert None not in began
    for first, last in itertools.combinations(range(len(began)), 2):
        minutes = (began[last] - began[first]) / 60
        assert last - first <= max_rpm * minutes + 1e-6
        assert (last - first) * tokens <= max_tpm * minutes + 1e-3


@settings(deadline=None)
@given(
    takes=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 50)), min_size=1, max_size=40),
    per_minute=st.floats(1, 1000),
    capacity=st.floats(0.5, 60),
)
def test_a_bucket_gives_out_its_capacity_and_what_flows_in(takes, per_minute, capacity):
    bucket, now, spent = TokenBucket(per_minute, capacity, 0.0), 0.0, []
    for pause, amount in takes:
        now += pause
        spent.append((now + bucket.take(amount, now), amount))
    assert all(later >= earlier - 1e-6 for (earlier, _), (later, _) in itertools.pairwise(spent))
    spent.sort()
    for i, j in itertools.combinations(range(len(spent)), 2):
        amounts = [amount for _, amount in spent[i : j + 1]]
        span = spent[j][0] - spent[i][0]
        assert sum(amounts) <= max(capacity, max(amounts)) + per_minute / 60 * span + 1e-6


def test_without_limits_everything_begins_at_once():
    began, most = begins({"max_concurrent": 100}, [1.0] * 100)
    assert began == [0.0] * 100
    assert most == 100


def test_the_limit_is_used_up():
    # 60 a minute: one a second, the first at once. 50 tokens of 600 a minute: one in 5 seconds.
    assert begins({"max_concurrent": 9, "max_rpm": 60}, [0.1] * 4)[0] == pytest.approx([0, 1, 2, 3])
    limits = {"max_concurrent": 9, "max_tpm": 600, "tokens_per_request": 50}
    assert begins(limits, [0.1] * 3)[0] == pytest.approx([0, 5, 10])


def test_what_a_request_really_took_is_settled():
    limits = {"max_concurrent": 9, "max_tpm": 600, "tokens_per_request": 50}

    def took(num_tokens):
        return lambda i, limiter: limiter.spent(num_tokens) if i == 0 else None

    assert begins(limits, [0.1] * 3, during=took(150))[0] == pytest.approx([0, 15, 20])
    assert begins(limits, [0.1] * 3, [0, 0.1, 0.1], during=took(0))[0] == pytest.approx([0, 0.1, 5.1])


def test_a_server_that_asks_to_wait_gets_its_pause_and_no_rush_after_it():
    began, _ = begins(
        {"max_concurrent": 9, "max_rpm": 60}, [0.1] * 5, during=lambda i, limiter: i == 1 and limiter.pause(10)
    )
    assert began[:2] == pytest.approx([0, 1])
    assert began[2] >= 11 - 1e-9
    assert all(later - earlier >= 1 - 1e-9 for earlier, later in itertools.pairwise(began[2:]))
