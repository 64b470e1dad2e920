"""Dispatch -> execute -> collect gives the same results under both controllers and any number of workers."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from workers_for_tests import EveryMode, Mesh, add, numbers

from burnish.protocol import DataProtoFuture
from burnish.single_controller import (
    Dispatch,
    Execute,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
)
from burnish.utils.errors import WorkerError

CONTROLLERS = ("local", "ray1", "ray2")


@pytest.fixture(scope="module")
def roles(ray_started) -> Iterator[dict[str, dict[str, WorkerGroup]]]:
    """Groups of EveryMode and Mesh, in the same processes, by controller and number of workers."""
    from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup

    both = {"every": RayClassWithInitArgs(EveryMode, offset=0.5), "mesh": RayClassWithInitArgs(Mesh)}
    made = create_colocated_worker_cls(both)
    pools = {f"ray{size}": RayResourcePool([size], use_gpu=False, name_prefix=f"ray{size}") for size in (1, 2)}
    groups: dict[str, WorkerGroup] = {name: RayWorkerGroup(pool, made) for name, pool in pools.items()}
    groups["local"] = LocalWorkerGroup(None, made)
    yield {name: group.spawn(both) for name, group in groups.items()}
    for pool in pools.values():
        pool.release()


@pytest.fixture(scope="module")
def groups(roles) -> dict[str, WorkerGroup]:
    """The groups of EveryMode."""
    return {name: by_role["every"] for name, by_role in roles.items()}


@pytest.fixture(params=CONTROLLERS)
def group(groups: dict[str, WorkerGroup], request: pytest.FixtureRequest) -> WorkerGroup:
    return groups[request.param]


def test_rank_zero_modes_return_the_result_of_rank_zero(group):
    assert group.only_first("rank") == "rank 0"
    assert group.one_to_all_on_first("rank") == "rank 0"
    assert group.only_first_later("later").get() == "later"
    assert group.execute_rank_zero_sync("one_to_all", "a", times=2) == "aa"
    assert group.execute_rank_zero_async("one_to_all", "a", times=2).get() == "aa"


def test_one_to_all_gives_every_rank_the_same_and_a_list_back(group):
    assert group.one_to_all("ab", times=2) == ["abab"] * group.world_size
    assert group.execute_all_sync("one_to_all", "ab", times=2) == ["abab"] * group.world_size
    assert [future.get() for future in group.execute_all_async("one_to_all", "c")] == ["c"] * group.world_size
    assert [future.get() for future in group.one_to_all_later("r")] == [f"r {r}" for r in range(group.world_size)]


@pytest.mark.parametrize("method", ["all_to_all", "dp_compute"])
def test_lists_by_rank_are_taken_apart_and_never_guessed_at(group, method):
    ranks = range(group.world_size)
    if method == "all_to_all":
        assert group.all_to_all([10 + rank for rank in ranks], b=list(ranks)) == [10 + 2 * r for r in ranks]
    else:
        assert group.dp_compute([[rank, 5] for rank in ranks]) == [rank + 5 for rank in ranks]
    with pytest.raises(WorkerError, match=r"one value for each of the .* ranks, but got a value of type int"):
        getattr(group, method)(7)
    with pytest.raises(WorkerError, match="of type list of 5"):
        getattr(group, method)([1, 2, 3, 4, 5])


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_a_batch_comes_back_in_order_and_without_padding(group, num_rows):
    data = numbers(num_rows)
    result = group.proto(data, factor=2.0)
    assert torch.equal(result.batch["y"], torch.arange(num_rows) * 2 + 0.5)
    assert result.non_tensor_batch["uid"].tolist() == [f"row {row}" for row in range(num_rows)]
    assert isinstance(result.meta_info["metrics"]["mean"], list)


def test_the_caller_keeps_its_batch_as_it_was(group):
    for num_rows in (4, 5):
        data = numbers(num_rows)
        group.proto(data)
        assert set(data.batch.keys()) == {"x", "response_mask", "loss_mask"}
        assert data.meta_info == {"step": 3}
        assert data.batch["loss_mask"].all()


def test_what_a_worker_returns_belongs_to_the_caller(group):
    first = group.proto(numbers(4))
    first.pop(batch_keys=["y"])
    assert "y" in group.proto(numbers(4)).batch


def test_several_batches_of_one_call_are_cut_alike(group):
    result = group.two_protos(numbers(5), other=numbers(5))
    assert torch.equal(result.batch["y"], torch.arange(5) * 2.0)
    with pytest.raises(WorkerError, match=r"different numbers of rows: \[5, 4\]"):
        group.two_protos(numbers(5), other=numbers(4))


def test_a_function_goes_to_every_rank_before_the_batch(group):
    result = group.with_function(add, numbers(5), 3.0)
    assert torch.equal(result.batch["y"], torch.arange(5) + 3.0)
    with pytest.raises(WorkerError, match="first argument of this method is a function"):
        group.with_function(3, numbers(5), 3.0)


def test_metrics_come_as_a_list_by_rank(group):
    metrics = group.metric(numbers(4))
    assert len(metrics) == group.world_size
    assert [x for rank in metrics for x in rank["x"]] == [0, 1, 2, 3]


def test_rows_that_pad_a_batch_count_in_no_mask(groups):
    first, second = groups["ray2"].metric(numbers(5))
    assert first == {"x": [0, 1, 2], "trained_on": [True] * 3, "sampled": [True] * 3}
    assert second == {"x": [3, 4, 0], "trained_on": [True, True, False], "sampled": [True, True, False]}


def test_several_rows_for_each_row_lose_those_of_padding_only(group):
    assert group.twice(numbers(5)).batch["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_rank_of_nothing_but_padding_leaves_no_trace(groups):
    assert groups["ray2"].proto(numbers(1)).meta_info["metrics"]["mean"] == [0.0]


def test_a_future_is_waited_for_by_get_or_by_the_next_call(group):
    future = group.proto_later(numbers(5))
    assert isinstance(future, DataProtoFuture)
    future.get().pop(batch_keys=["x"])
    assert torch.equal(future.get().batch["x"], torch.arange(5) + 100.0)
    again = group.proto_later(group.proto_later(numbers(5)))
    assert torch.equal(again.get().batch["x"], torch.arange(5) + 200.0)
    assert group.twice(future).batch["x"].tolist() == [100, 100, 101, 101, 102, 102, 103, 103, 104, 104]


def test_a_future_of_one_group_feeds_another(groups):
    for first in CONTROLLERS:
        for second in CONTROLLERS:
            if (first == "local") == (second == "local"):
                result = groups[second].proto_later(groups[first].proto_later(numbers(3)))
                assert torch.equal(result.get().batch["x"], torch.arange(3) + 200.0)


def test_a_method_may_ask_for_the_future_itself(group):
    result = group.unmaterialized(group.proto_later(numbers(4)))
    assert torch.equal(result.batch["x"], torch.arange(4) + 100.0)


def test_calls_that_are_not_waited_for_run_side_by_side(groups):
    start = time.monotonic()
    futures = [groups[name].proto_later(numbers(2), seconds=1.0) for name in ("ray1", "ray2")]
    assert time.monotonic() - start < 0.9
    for future in futures:
        future.get()
    assert time.monotonic() - start < 1.9


def test_a_batch_method_wants_a_batch_and_gives_one(group):
    with pytest.raises(WorkerError, match="none is among its arguments"):
        group.proto(3)


def test_functions_of_ones_own_dispatch_and_collect(group):
    assert group.own_functions(7) == 7 * group.world_size


def test_a_group_method_keeps_name_and_docstring(group):
    assert group.only_first.__name__ == "only_first"
    assert group.only_first.__doc__ == "A docstring that the group's method keeps."


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("num_rows", [3, 4])
def test_rows_follow_the_mesh_and_come_back_in_order(roles, name, num_rows):
    group = roles[name]["mesh"]
    expected = [2.0 * row for row in range(num_rows)]
    last = group.world_size - 1
    result = group.reversed(numbers(num_rows))
    assert result.batch["y"].tolist() == expected
    # The last rank has the first rows.
    assert result.batch["rank"][0] == last
    assert result.batch["rank"][-1] == 0
    result = group.replicated(numbers(num_rows))
    assert result.batch["y"].tolist() == expected
    assert result.batch["rank"].tolist() == [last] * num_rows
    assert group.reversed_later(group.reversed_later(numbers(num_rows))).get().batch["x"].tolist() == [
        2 * value for value in expected
    ]


@pytest.mark.parametrize("name", CONTROLLERS)
def test_metrics_on_a_mesh_come_from_every_rank_and_a_batch_has_a_shard_for_each_group(roles, name):
    group = roles[name]["mesh"]
    assert group.dp_size("reversed") == group.world_size
    assert group.dp_size("replicated") == 1
    assert group.sums_on_replicated(numbers(4)) == [(rank, 6.0) for rank in range(group.world_size)]


def test_a_mesh_that_does_not_cover_the_rows_is_refused(roles):
    with pytest.raises(WorkerError, match="exactly one rank that collects"):
        roles["ray2"]["mesh"].on_broken_mesh(numbers(4))
    with pytest.raises(WorkerError, match=r"no place on a mesh 'unknown' \(known: reversed, replicated, broken\)"):
        roles["local"]["mesh"].on_unknown_mesh(numbers(3))


def test_a_result_that_is_no_batch_is_refused_where_batches_are_joined():
    with pytest.raises(WorkerError, match=r"Rank 0 returned a value of type int .*DP_COMPUTE_METRIC"):
        LocalWorkerGroup(None, RayClassWithInitArgs(EveryMode)).no_proto(numbers(2))


def test_rows_that_cannot_be_told_from_padding_are_an_error(groups):
    from burnish.single_controller.sharding import Shard, drop_padding

    assert len(drop_padding(numbers(6), Shard(numbers(3), 1))) == 4
    with pytest.raises(WorkerError, match="which of them belong to padding is unknown"):
        drop_padding(numbers(4), Shard(numbers(3), 1))


def test_modes_that_contradict_each_other_are_refused():
    with pytest.raises(WorkerError, match="would run the first rank's share only"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(WorkerError, match="'dispatch_fn' and 'collect_fn'"):
        register(dispatch_mode={"dispatch_fn": len})
    with pytest.raises(WorkerError, match=r"no dispatch mode 'TWICE'. Known: RANK_ZERO"):
        get_predefined_dispatch_fn("TWICE")
    with pytest.raises(WorkerError, match="exists already"):
        register_dispatch_mode("ONE_TO_ALL", len, len)


def test_a_registered_mode_is_used_by_name():
    def to_each(worker_group: WorkerGroup, value: int) -> tuple:
        return ([value + rank for rank in range(worker_group.world_size)],), {}

    register_dispatch_mode("COUNT_UP", to_each, lambda worker_group, outputs: max(outputs))

    class Counts(Worker):
        @register(dispatch_mode="COUNT_UP")
        def count(self, value: int) -> int:
            return value

    assert LocalWorkerGroup(None, RayClassWithInitArgs(Counts)).count(3) == 3


def test_a_method_may_not_hide_one_of_the_group():
    class Shadows(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shutdown(self) -> None:
            pass

    with pytest.raises(WorkerError, match=r"Shadows.shutdown cannot be registered"):
        LocalWorkerGroup(None, RayClassWithInitArgs(Shadows))


def test_the_package_imports_without_ray():
    code = "import sys, burnish.single_controller; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
