"""Processes say what they are doing; a stage that gets further may take long, and one that does not is named with its place."""

import time
from collections.abc import Callable, Iterator

import pytest
from workers_for_tests import Working

from burnish.single_controller import LocalWorkerGroup, RayClassWithInitArgs
from burnish.single_controller.heartbeat import IDLE, Beat, Listener, Pulse
from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup
from burnish.utils import progress
from burnish.utils.errors import StalledError


def beat(number: int, idle: float = 0.0) -> Beat:
    return Beat(number=number, stage="gen", since=0.0, idle=idle, pid=1, node="here")


def test_a_pulse_tells_the_stage_and_that_it_got_further():
    pulse = Pulse("node-7")
    assert pulse.beat().stage == IDLE
    with pulse.stage("actor.update_actor"):
        with pulse.stage("__init__"):
            assert pulse.beat().stage == "__init__"
        inside = pulse.beat()
        assert (inside.stage, inside.node) == ("actor.update_actor", "node-7")
    assert pulse.beat().stage == IDLE
    assert pulse.beat().number > inside.number


def test_a_worker_that_says_nothing_new_gets_no_further(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    listener = Listener()
    assert listener.idle_seconds("rank 0") is None
    listener.hear("rank 0", beat(1, idle=3.0))
    now = 110.0
    listener.hear("rank 0", beat(1, idle=3.0))
    assert listener.idle_seconds("rank 0") == 13.0
    listener.hear("rank 0", beat(2, idle=0.5))
    assert listener.idle_seconds("rank 0") == 0.5


def test_a_local_stage_that_gets_further_may_take_long(tmp_path, monkeypatch):
    group = LocalWorkerGroup(None, RayClassWithInitArgs(Working), stage_timeout=0.2, stack_folder=str(tmp_path))
    asked = []

    def got_further_three_times() -> float:
        asked.append(True)
        return 0.0 if len(asked) <= 3 else 600.0

    monkeypatch.setattr(progress, "idle_seconds", got_further_three_times)
    begin = time.monotonic()
    with pytest.raises(
        StalledError, match=r"got no further in idle for 0.2 s .*It stands at .*workers_for_tests.py:\d+ in"
    ):
        group.idle(600)
    assert len(asked) == 4
    assert time.monotonic() - begin >= 0.6
    (file,) = tmp_path.iterdir()
    assert "in idle" in file.read_text()


def test_a_local_stage_that_swallows_the_error_is_interrupted_again():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(Working), stage_timeout=0.3)
    with pytest.raises(StalledError, match="got no further in stubborn"):
        group.stubborn(3)


@pytest.fixture
def start(ray_started, tmp_path) -> Iterator[Callable[..., RayWorkerGroup]]:
    pool, groups = RayResourcePool([2], use_gpu=False), []

    def start(**kwargs) -> RayWorkerGroup:
        with_args = RayClassWithInitArgs(Working)
        groups.append(RayWorkerGroup(pool, with_args, "actor", stack_folder=str(tmp_path), **kwargs))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()
    pool.release()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_on_a_cluster_tell_their_stage_and_a_stall_names_rank_and_place(start, tmp_path):
    group = start(stage_timeout=12.0)
    wait_for(lambda: set(group.beats()) == {"actor rank 0", "actor rank 1"})
    assert [one.pid for _, one in sorted(group.beats().items())] == group.pid()
    # Rank 1 has nothing to do and rank 0 gets further: longer than the limit, and no error.
    group.work_on(0, 16)
    futures = group.idle_on(1, 600)
    wait_for(lambda: group.beats()["actor rank 1"].stage == "idle_on")
    with pytest.raises(StalledError) as caught:
        futures[1].get()
    message = str(caught.value)
    assert message.startswith(
        "actor got no further in idle_on for 12 s (trainer.stage_timeout). No answer from: rank 1 of 2"
    )
    assert "which stands at" in message
    assert "workers_for_tests.py" in message
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("actor_rank_1.txt")
    assert str(file) in message
    assert "idle_on" in file.read_text()
