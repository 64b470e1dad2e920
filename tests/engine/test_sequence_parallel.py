"""An engine whose ranks share the tokens of a row takes the steps of one rank, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.utils.errors import ConfigError
from tests.engine.engine_program import make_engine, run_case, run_ranks
from tests.engine.test_ranks import TOLERANCE, distance

# One key head for four query heads: every rank of a group needs its copy.
ONE_KEY_HEAD = {"num_key_value_heads": 1}


def case(dtype: str, fsdp_size: int, module: str = "policy", **more: Any) -> dict[str, Any]:
    layout = {-1: "sharded", 1: "replicated", 2: "hybrid"}[fsdp_size]
    name = "-".join([dtype, layout, module, *more])
    shape = {"dtype": dtype, "fsdp_size": fsdp_size, "module": module, "sequence_parallel": 2}
    # Single rows, some of them shorter than the number of ranks.
    return {"name": name, "steps": 2, "micro_batch_size": 1, "config": ONE_KEY_HEAD} | shape | more


CASES = [
    case("float64", -1),
    case("float64", 1),
    case("float64", -1, gradient_checkpointing=True),
    case("float32", -1, mode="seq-mean-token-mean"),
    case("float32", 1, "value"),
    case("float32", -1, "value"),
    case("bfloat16", -1),
]
# Two groups of two ranks; one has fewer micro-batches than the other.
OF_FOUR = [each | {"uneven": True} for each in [CASES[0], CASES[4], case("float64", 2)]]
NAMES = [each["name"] for each in CASES]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one_rank")
    alone = {"sequence_parallel": 1, "micro_batch_size": 3, "fsdp_size": -1}
    return {each["name"]: run_case(each | alone, out) for each in [*CASES, OF_FOUR[-1]]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("two_ranks"), CASES)


def assert_same_steps(result: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    assert distance(result["gradients"], expected["gradients"]) < tolerance
    assert distance(result["weights"], expected["weights"]) < 10 * tolerance
    assert distance(result["log_probs"], expected["log_probs"]) < 10 * tolerance
    for mine, theirs in zip(result["updates"], expected["updates"], strict=True):
        assert mine == pytest.approx(theirs, rel=10 * tolerance)
    if dtype != "bfloat16":
        for mine, theirs in zip(result["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_that_share_rows_take_the_steps_of_one(name: str, two_ranks: Any, one_rank: Any) -> None:
    for rank in two_ranks:
        assert_same_steps(rank[name], one_rank[name], name.split("-")[0])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_a_group_agree_to_the_bit(name: str, two_ranks: Any) -> None:
    first, second = (rank[name] for rank in two_ranks)
    assert first["metrics"] == second["metrics"]
    assert first["updates"] == second["updates"]
    for key in ("weights", "log_probs"):
        assert all(torch.equal(value, second[key][name]) for name, value in first[key].items())


@pytest.mark.slow
def test_two_groups_of_two_ranks_take_the_steps_of_one(tmp_path: Path, one_rank: Any) -> None:
    for rank in run_ranks(tmp_path, OF_FOUR, world=4):
        for each in OF_FOUR:
            assert_same_steps(rank[each["name"]], one_rank[each["name"]], each["dtype"])


def test_a_group_that_the_ranks_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"size=2 does not divide the number of workers, which is 1\..*work: 1\."):
        make_engine(sequence_parallel=2)
