"""A worker that raises, dies or hangs ends the call with its name, the stage and the cause; nothing waits for ever."""

import os
import time
from collections.abc import Callable

import pytest
from workers_for_tests import EveryMode, FailsInConstructor, Fragile, Place, numbers

from burnish.single_controller import Dispatch, LocalWorkerGroup, RayClassWithInitArgs, Worker, register
from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup
from burnish.utils.errors import WorkerError

pytestmark = pytest.mark.usefixtures("ray_started")


@pytest.fixture(scope="module")
def pool(ray_started):
    pool = RayResourcePool([2], use_gpu=False)
    yield pool
    pool.release()


@pytest.fixture
def start(pool) -> Callable[..., RayWorkerGroup]:
    groups = []

    def start(cls: type = Fragile, **kwargs) -> RayWorkerGroup:
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(cls), **kwargs))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


def assert_gone(pids: list[int]) -> None:
    """The processes end within seconds."""
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_exception_names_worker_stage_and_cause_while_the_other_rank_hangs(start):
    group = start(name_prefix="actor")
    pids = group.pid()
    with pytest.raises(WorkerError) as caught:
        group.raise_on(1)
    message = str(caught.value)
    assert message.startswith("actor rank 1 of 2 (node ")
    assert f"pid {pids[1]}) failed in raise_on: ValueError: the weights are upside down" in message
    assert type(caught.value.__cause__) is ValueError
    assert any("workers_for_tests.py" in note for note in caught.value.__cause__.__notes__)
    assert_gone(pids)
    with pytest.raises(
        WorkerError, match="pid cannot run, since actor was stopped by an earlier failure: actor rank 1"
    ):
        group.pid()


def test_a_killed_worker_is_named_and_its_peer_does_not_hang(start):
    group = start()
    pids = group.pid()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^Fragile rank 1 of 2 \(node .*pid {pids[1]}\) died in die_on: "):
        group.die_on(1)
    assert time.monotonic() - begin < 30
    assert_gone(pids)


def test_a_stage_that_takes_too_long_names_who_did_not_answer(start):
    group = start(stage_timeout=1.5)
    pids = group.pid()
    with pytest.raises(WorkerError) as caught:
        group.sleep_on(1, 600)
    message = str(caught.value)
    assert "did not finish sleep_on within 1.5 s (trainer.stage_timeout). No answer from: rank 1 of 2" in message
    assert "rank 0" not in message
    assert_gone(pids)


def test_a_call_that_was_not_waited_for_fails_where_its_result_is_needed(start):
    group = start()
    future = group.fail_later(numbers(2))
    with pytest.raises(WorkerError, match="failed in fail_later: ValueError: too late"):
        future.get()
    with pytest.raises(WorkerError):
        future.get()


def test_a_failed_future_names_its_own_stage_and_not_the_one_that_waited_for_it(start):
    failing, waiting = start(), start(EveryMode)
    with pytest.raises(WorkerError, match="^Fragile rank . of 2 .* failed in fail_later: ValueError: too late"):
        waiting.proto(failing.fail_later(numbers(2)))


def test_an_error_that_does_not_travel_is_still_told(start):
    with pytest.raises(WorkerError, match="(?s)failed in raise_own_error.*this and that"):
        start().raise_own_error()


def test_a_worker_that_cannot_be_made_says_why(start):
    with pytest.raises(
        WorkerError, match="FailsInConstructor rank . of 2 .* failed in __init__: OSError: no such model"
    ):
        start(FailsInConstructor)
    with pytest.raises(WorkerError, match="failed in __init__: OSError: no such model"):
        LocalWorkerGroup(None, RayClassWithInitArgs(FailsInConstructor))


def test_a_class_that_cannot_travel_is_refused_with_the_way_out(pool):
    unpicklable = (value for value in ())
    with pytest.raises(WorkerError, match="EveryMode and its arguments cannot be sent to the workers"):
        RayWorkerGroup(pool, RayClassWithInitArgs(EveryMode, unpicklable))


def test_shutdown_ends_the_processes_and_may_be_called_again(start):
    group = start()
    pids = group.pid()
    group.shutdown()
    group.shutdown()
    assert_gone(pids)
    with pytest.raises(WorkerError, match="pid cannot run, since Fragile was shut down"):
        group.pid()


def test_processes_that_do_not_start_in_time_are_named(pool):
    with pytest.raises(WorkerError, match=r"did not finish start within 0.01 s \(start_timeout\)"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Place), start_timeout=0.01)


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
    with pytest.raises(WorkerError, match="^actor rank 0 of 1 .* failed in fail: KeyError: 'gone'") as caught:
        group.fail()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyboardInterrupt):
        group.interrupted()


def test_the_local_controller_ends_a_stage_that_takes_too_long():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(InThisProcess), stage_timeout=0.3)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"did not finish hang within 0.3 s \(trainer.stage_timeout\)"):
        group.hang()
    assert time.monotonic() - begin < 5
    assert os.getpid()
