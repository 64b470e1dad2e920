"""Where workers run: ranks, environment, rendezvous, colocated roles, resource pools."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import ray
from workers_for_tests import EveryMode, OtherPlace, Place, numbers, wait_until_gone

from burnish.single_controller import (
    LocalResourcePoolManager,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup, ResourcePoolManager
from burnish.single_controller.ray.nodes import _make_question, facts_of, here, survey
from burnish.single_controller.ray.resource_pool import addresses, what_lacks
from burnish.utils import env
from burnish.utils.errors import ResourceError, WorkerError

pytestmark = pytest.mark.usefixtures("ray_started")


REPO = Path(__file__).resolve().parents[2]
ROLES = {"actor": RayClassWithInitArgs(Place), "critic": RayClassWithInitArgs(OtherPlace)}


@pytest.fixture(scope="module")
def started(ray_started) -> Iterator[dict[str, WorkerGroup]]:
    """A group in this process, one of a single Ray worker, and two that share a pool of two processes."""
    made = create_colocated_worker_cls(ROLES)
    pool, single = RayResourcePool([2], use_gpu=False), RayResourcePool([1], use_gpu=False)
    with chdir("/"):
        two = RayWorkerGroup(pool, made, collective_timeout=1234)
    yield {
        "local": LocalWorkerGroup(None, made),
        "single": RayWorkerGroup(single, made),
        "one": RayWorkerGroup(pool, made),
        "two": two,
    }
    pool.release()
    single.release()


def test_every_rank_knows_its_place(started):
    places = started["one"].spawn({"actor"})["actor"].place()
    for rank, place in enumerate(places):
        assert (place["rank"], place["world_size"], place["local_rank"]) == (rank, 2, rank)
        assert place["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": places[0]["env"]["MASTER_ADDR"],
            "MASTER_PORT": str(places[0]["master_port"]),
        }
        assert place["threads"] == max(1, env.num_cpus() // 2)
    assert places[0]["pid"] != places[1]["pid"]


def test_two_groups_that_meet_at_once_both_meet(started):
    groups = [started[name].spawn({"actor"})["actor"] for name in ("one", "two")]
    ports = {group.place()[0]["master_port"] for group in groups}
    assert len(ports) == 2
    futures = [future for group in groups for future in group.sum_of_ranks()]
    assert [future.get() for future in futures] == [3.0] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo chooses by the host's name")
def test_ranks_meet_on_the_interface_of_their_nodes_address_whatever_the_hosts_name_resolves_to(started):
    group = started["one"].spawn({"actor"})["actor"]
    [future.get() for future in group.sum_of_ranks()]
    for interface, expected in group.gloo_interface():
        assert interface == expected
        assert interface is not None


def test_roles_in_one_process_share_its_process_group(started):
    roles = started["one"].spawn(ROLES)
    for role in ("actor", "critic"):
        assert [future.get() for future in roles[role].sum_of_ranks()] == [3.0, 3.0]


@pytest.mark.parametrize("name", ["local", "single"])
def test_a_group_of_one_has_no_process_group_and_all_threads(started, name):
    group = started[name].spawn({"actor"})["actor"]
    (place,) = group.place()
    assert place["env"]["RANK"] == "0"
    assert place["env"]["WORLD_SIZE"] == "1"
    assert place["threads"] == env.num_cpus()
    assert [future.get() for future in group.sum_of_ranks()] == [None]


@pytest.mark.parametrize("name", ["local", "one"])
def test_colocated_roles_share_processes_and_act_as_groups_of_their_own(started, name):
    group = started[name]
    spawned = group.spawn({"actor", "critic"})
    pids = [[place["pid"] for place in spawned[role].place()] for role in ("actor", "critic")]
    assert pids[0] == pids[1]
    assert len(set(pids[0])) == group.world_size
    assert hasattr(spawned["critic"], "only_of_critic")
    assert not hasattr(spawned["actor"], "only_of_critic")
    assert not hasattr(group, "place")
    with pytest.raises(WorkerError, match="holds the roles actor, critic, not judge"):
        group.spawn({"judge"})


def test_ranks_wait_for_each_other_as_long_as_the_group_was_told(started):
    assert started["two"].spawn({"actor"})["actor"].seconds_to_wait() == [1234.0, 1234.0]


def test_processes_run_where_the_driver_ran_when_it_made_them(started):
    folders = {
        name: {place["folder"] for place in started[name].spawn({"actor"})["actor"].place()} for name in ("one", "two")
    }
    assert folders == {"one": {os.getcwd()}, "two": {"/"}}


def test_a_node_says_what_it_has(ray_started, tmp_path):
    import burnish

    pool = RayResourcePool([1], use_gpu=False)
    pool.reserve()
    assert set(pool.nodes) <= addresses().keys()
    gone = tmp_path / "gone"
    (facts,) = survey({node: addresses()[node] for node in pool.nodes}, [str(tmp_path), str(gone)])
    assert facts.missing == (str(gone),)
    ours = here(facts.address)
    assert (facts.burnish, facts.fingerprint, facts.folder) == (burnish.__version__, ours.fingerprint, ours.folder)
    assert (facts.packages, facts.python, facts.problem) == (ours.packages, ours.python, "")
    pool.release()
    assert pool.nodes == ()


def test_a_node_without_burnish_can_be_asked_too():
    # In another interpreter, as on another machine: what travels must not need burnish to be read.
    from ray import cloudpickle

    question = cloudpickle.dumps(_make_question()).hex()
    program = f"""
import sys
sys.path = [folder for folder in sys.path if folder not in {["", str(REPO)]!r}]
from ray import cloudpickle
sys.modules["burnish"] = None
print(cloudpickle.loads(bytes.fromhex("{question}"))(["/nowhere"], ("torch", "no-such-package")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    facts = facts_of("10.0.0.2", done.stdout)
    assert "ModuleNotFoundError" in facts.problem
    assert facts.executable == sys.executable
    assert facts.packages["no-such-package"] == ""
    assert facts.packages["torch"]
    assert facts.missing == ("/nowhere",)


@pytest.mark.parametrize("name", ["local", "two"])
def test_shutdown_ends_all_roles_and_may_be_called_again(started, name):
    spawned = started[name].spawn(ROLES)
    pids = [place["pid"] for place in spawned["actor"].place()]
    for role in ("critic", "critic", "actor"):
        spawned[role].shutdown()
    with pytest.raises(WorkerError, match="place cannot run, since actor was shut down"):
        spawned["actor"].place()
    if name != "local":
        wait_until_gone(pids)


def test_only_colocated_classes_spawn():
    with pytest.raises(WorkerError, match="create_colocated_worker_cls"):
        LocalWorkerGroup(None, RayClassWithInitArgs(Place)).spawn({"actor"})
    with pytest.raises(WorkerError, match="at least one role"):
        create_colocated_worker_cls({})


def test_a_class_wrapped_by_ray_remote_is_taken_too():
    group = LocalWorkerGroup(None, RayClassWithInitArgs(ray.remote(EveryMode), offset=2.0))
    assert group.proto(numbers(1)).batch["y"].tolist() == [2.0]


def test_more_than_the_cluster_has_is_refused_at_once():
    manager = ResourcePoolManager({"global_pool": [64], "reward_pool": [1]}, {"actor": "global_pool"}, use_gpu=False)
    start = time.monotonic()
    with pytest.raises(ResourceError, match=r"Asked: 65 CPU on 1 node.*global_pool=\[64\].* CPU \(of 8\)"):
        manager.create_resource_pool()
    with pytest.raises(ResourceError, match=r"Asked: 2 CPU, 2 GPU .* 0 GPU \(of 0\)"):
        RayResourcePool([2], use_gpu=True).reserve()
    with pytest.raises(ResourceError, match=r"on 2 node\(s\)"):
        RayResourcePool([1, 1], use_gpu=False).reserve()
    assert time.monotonic() - start < 2


def test_what_the_cluster_lacks_can_be_asked_without_taking_anything(ray_started):
    few, many = RayResourcePool([1], use_gpu=False), RayResourcePool([64], use_gpu=False)
    assert what_lacks({"few": few}, now=False) is None
    assert "many=[64]" in what_lacks({"few": few, "many": many}, now=False)
    taken = RayResourcePool([ray_started.cluster_resources()["CPU"] // 1], use_gpu=False)
    assert what_lacks({"taken": taken}, now=False) is None
    assert few.nodes == ()


def test_what_is_in_use_is_refused_and_nothing_stays_reserved(monkeypatch):
    from burnish.single_controller.ray import resource_pool

    monkeypatch.setattr(resource_pool, "_SECONDS_UNTIL_FREED", 0.5)
    first = RayResourcePool([4], use_gpu=False)
    first.reserve()
    second = ResourcePoolManager({"a": [2], "b": [3]}, {"actor": "a"}, use_gpu=False)
    with pytest.raises(ResourceError, match=r"[0-4] CPU \(of 8\)"):
        second.create_resource_pool()
    first.release()
    monkeypatch.undo()
    second.create_resource_pool()
    assert second.get_resource_pool("actor").world_size == 2
    assert second.get_n_gpus() == 5
    second.shutdown()
    second.shutdown()


def test_roles_and_pools_that_do_not_match_are_refused():
    with pytest.raises(ResourceError, match="'gone', but the pools are a"):
        LocalResourcePoolManager({"a": [1]}, {"actor": "gone"})
    manager = LocalResourcePoolManager({"a": [1]}, {"actor": "a"})
    with pytest.raises(ResourceError, match="do not exist yet"):
        manager.get_resource_pool("actor")
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor").world_size == 1
    with pytest.raises(ResourceError, match="The role critic has no resource pool"):
        manager.get_resource_pool("critic")
    with pytest.raises(ResourceError, match=r"trainer.controller=ray"):
        LocalResourcePoolManager({"a": [2]}, {"actor": "a"}).create_resource_pool()
    with pytest.raises(ResourceError, match="at least one process"):
        ResourcePool([2, 0])
    with pytest.raises(ResourceError, match="the pool has 3"):
        LocalWorkerGroup(ResourcePool([1, 2]), RayClassWithInitArgs(Place))


def test_ranks_are_counted_node_by_node():
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool.local_rank_list == [0, 1, 0, 1, 2]
    assert pool.local_world_size_list == [2, 2, 3, 3, 3]


@pytest.mark.slow
def test_a_pool_over_two_nodes_puts_a_process_on_each():
    # A process can be connected to one cluster only, so this one gets a driver of its own.
    script = Path(__file__).with_name("two_nodes_driver.py")
    path = os.pathsep.join([str(script.parent), str(script.parents[2])])
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert "both nodes met" in result.stdout
