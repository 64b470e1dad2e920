"""A worker that raises, dies or hangs ends the call with its name, the stage and the cause; nothing waits for ever."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from workers_for_tests import EveryMode, FailsInConstructor, Fragile, Place, numbers, wait_until_gone

from burnish.single_controller import Dispatch, LocalWorkerGroup, RayClassWithInitArgs, Worker, register
from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup
from burnish.utils.errors import WorkerError

pytestmark = pytest.mark.usefixtures("ray_started")


@pytest.fixture(scope="module")
def pools(ray_started) -> Iterator[dict[int, RayResourcePool]]:
    """Pools by their number of processes."""
    pools = {size: RayResourcePool([size], use_gpu=False) for size in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.release()


@pytest.fixture
def start(pools) -> Iterator[Callable[..., RayWorkerGroup]]:
    """Starts groups that end with the test."""
    groups = []

    def start(num_workers: int, cls: type = Fragile, **kwargs) -> RayWorkerGroup:
        groups.append(RayWorkerGroup(pools[num_workers], RayClassWithInitArgs(cls), **kwargs))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


def test_an_exception_names_worker_stage_and_cause_while_the_other_rank_hangs(start):
    group = start(2, name_prefix="actor")
    pids = group.pid()
    with pytest.raises(WorkerError) as caught:
        group.raise_on(1)
    message = str(caught.value)
    assert message.startswith("actor rank 1 of 2 (node ")
    assert f"pid {pids[1]}) failed in raise_on: ValueError: the weights are upside down" in message
    assert type(caught.value.__cause__) is ValueError
    assert any("workers_for_tests.py" in note for note in caught.value.__cause__.__notes__)
    wait_until_gone(pids)
    with pytest.raises(
        WorkerError, match="pid cannot run, since actor was stopped by an earlier failure: actor rank 1"
    ):
        group.pid()


def test_a_killed_worker_is_named_and_its_peer_does_not_hang(start):
    group = start(2)
    pids = group.pid()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^Fragile rank 1 of 2 \(node .*pid {pids[1]}\) died in die_on: "):
        group.die_on(1)
    assert time.monotonic() - begin < 30
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_names_who_did_not_answer(start):
    group = start(2, stage_timeout=1.5)
    pids = group.pid()
    with pytest.raises(WorkerError) as caught:
        group.sleep_on(1, 600)
    message = str(caught.value)
    assert "got no further in sleep_on for 1.5 s (trainer.stage_timeout). No answer from: rank 1 of 2" in message
    assert "rank 0" not in message
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_call_that_was_not_waited_for_fails_where_its_result_is_needed(start):
    failing, waiting = start(1), start(1, EveryMode)
    future = failing.fail_later(numbers(2))
    # The call that needs the result is not the one that failed.
    with pytest.raises(WorkerError, match=r"^Fragile rank 0 of 1 .* failed in fail_later: ValueError: too late"):
        waiting.proto(future)
    for _ in range(2):
        with pytest.raises(WorkerError, match="failed in fail_later: ValueError: too late"):
            future.get()


def test_an_error_that_does_not_travel_is_still_told(start):
    with pytest.raises(WorkerError, match=r"(?s)failed in raise_own_error.*this and that"):
        start(1).raise_own_error()


def test_a_worker_that_cannot_be_made_says_why(start):
    with pytest.raises(WorkerError, match=r"FailsInConstructor rank 0 of 1 .* failed in __init__: OSError: no such"):
        start(1, FailsInConstructor)
    with pytest.raises(WorkerError, match="failed in __init__: OSError: no such model"):
        LocalWorkerGroup(None, RayClassWithInitArgs(FailsInConstructor))


def test_a_class_that_cannot_travel_is_refused_with_the_way_out(pools):
    unpicklable = (value for value in ())
    with pytest.raises(WorkerError, match="EveryMode and its arguments cannot be sent to the workers"):
        RayWorkerGroup(pools[1], RayClassWithInitArgs(EveryMode, unpicklable))


def test_processes_that_do_not_start_in_time_are_named(pools):
    with pytest.raises(WorkerError, match=r"got no further in start for 0.01 s \(start_timeout\)"):
        RayWorkerGroup(pools[1], RayClassWithInitArgs(Place), start_timeout=0.01)


class InThisProcess(Worker):
    """Fails or hangs in the driver's process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError("gone")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang(self) -> None:
        time.sleep(600)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def interrupted(self) -> None:
        raise KeyboardInterrupt


def test_the_local_controller_names_stage_and_cause_too():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(InThisProcess), name_prefix="actor")
    with pytest.raises(WorkerError, match=r"^actor rank 0 of 1 .* failed in fail: KeyError: 'gone'") as caught:
        group.fail()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyboardInterrupt):
        group.interrupted()


def test_the_local_controller_ends_a_stage_that_takes_too_long():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(InThisProcess), stage_timeout=0.3)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"got no further in hang for 0.3 s \(trainer.stage_timeout\)"):
        group.hang()
    assert time.monotonic() - begin < 5


def test_a_timer_of_the_caller_goes_on_behind_a_stage_with_a_limit():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(InThisProcess), stage_timeout=60)
    before = signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with pytest.raises(WorkerError):
            group.fail()
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
