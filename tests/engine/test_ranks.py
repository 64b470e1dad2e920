"""One rank and two take the same steps, sharded (FSDP2) and replicated, and read each other's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engine_program import run_case, run_ranks


def case(dtype: str, fsdp_size: int, module: str = "policy", **more: Any) -> dict[str, Any]:
    # Uneven shares, so that one rank has fewer micro-batches than the other.
    name = f"{dtype}-{'sharded' if fsdp_size == -1 else 'replicated'}-{module}" + "-resumed" * ("load" in more)
    shape = {"dtype": dtype, "fsdp_size": fsdp_size, "module": module}
    return {"name": name, "steps": 3, "micro_batch_size": 2, "uneven": True} | shape | more


CASES = [
    case("float64", -1, save="two_float64", poison=True),
    case("float64", 1),
    case("float32", -1, mode="seq-mean-token-mean"),
    case("float32", 1, mode="seq-mean-token-mean"),
    case("float32", -1, "value", save="two_value"),
    case("bfloat16", -1, save="two_bfloat16"),
    case("bfloat16", 1, poison=True),
]
NAMES = [each["name"] for each in CASES]


@pytest.fixture(scope="module")
def saved_by_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of one rank, and how that rank went on."""
    out = tmp_path_factory.mktemp("one_rank")
    return out / "one", run_case(case("float64", -1, save="one"), out)


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, saved_by_one: tuple[Path, dict[str, Any]]
) -> tuple[Path, list[dict[str, Any]]]:
    """Every case on two ranks, in one start of two processes."""
    out = tmp_path_factory.mktemp("two_ranks")
    resumed = [case("float64", fsdp_size, load=str(saved_by_one[0])) for fsdp_size in (-1, 1)]
    return out, run_ranks(out, CASES + resumed)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case on one rank, cut into other micro-batches."""
    out = tmp_path_factory.mktemp("one_rank_cases")
    return {each["name"]: run_case(each | {"micro_batch_size": 3}, out) for each in CASES}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (difference / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5


TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_gradient_and_weights_of_one(name: str, two_ranks: Any, one_rank: Any) -> None:
    tolerance = TOLERANCE[name.split("-")[0]]
    for rank in two_ranks[1]:
        result, expected = rank[name], one_rank[name]
        assert distance(result["gradients"], expected["gradients"]) < tolerance
        # Clipping and three steps of AdamW, whose first step divides a gradient by its own size, lie between.
        assert distance(result["weights"], expected["weights"]) < 10 * tolerance
        for mine, theirs in zip(result["updates"], expected["updates"], strict=True):
            assert mine == pytest.approx(theirs, rel=10 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_report_the_metrics_of_the_whole_step(name: str, two_ranks: Any, one_rank: Any) -> None:
    first, second = (rank[name] for rank in two_ranks[1])
    assert first["metrics"] == second["metrics"]
    assert first["updates"] == second["updates"]
    if name.startswith("float"):
        for mine, theirs in zip(first["metrics"], one_rank[name]["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_to_the_bit_on_the_weights_and_what_they_infer(name: str, two_ranks: Any) -> None:
    first, second = (rank[name] for rank in two_ranks[1])
    assert all(torch.equal(weight, second["weights"][key]) for key, weight in first["weights"].items())
    assert all(torch.equal(value, second["log_probs"][key]) for key, value in first["log_probs"].items())


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("float64-sharded-policy", "two_float64"),
        ("float32-sharded-value", "two_value"),
        ("bfloat16-sharded-policy", "two_bfloat16"),
    ],
)
def test_one_rank_goes_on_from_a_checkpoint_of_two(name: str, save: str, two_ranks: Any, tmp_path: Path) -> None:
    out, results = two_ranks
    same = next(each for each in CASES if each["name"] == name)
    resumed = run_case(
        {key: value for key, value in same.items() if key != "save"} | {"load": str(out / save)}, tmp_path
    )
    tolerance = TOLERANCE[name.split("-")[0]]
    assert distance(resumed["weights"], results[0][name]["after_save"]["weights"]) < 10 * tolerance


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_two_ranks_go_on_from_a_checkpoint_of_one(layout: str, two_ranks: Any, saved_by_one: Any) -> None:
    expected = saved_by_one[1]["after_save"]["weights"]
    for rank in two_ranks[1]:
        assert distance(rank[f"float64-{layout}-policy-resumed"]["weights"], expected) < 1e-9


@pytest.mark.slow
def test_copies_that_are_sharded_each_over_two_of_four_ranks_agree_with_one(tmp_path: Path, one_rank: Any) -> None:
    cases = [case("float64", 2) | {"name": "float64-sharded-policy", "uneven": False}]
    for rank in run_ranks(tmp_path, cases, world=4):
        assert distance(rank["float64-sharded-policy"]["weights"], one_rank["float64-sharded-policy"]["weights"]) < 1e-9


@pytest.mark.parametrize(
    ("name", "prefix"), [("float64-sharded-policy", ""), ("bfloat16-replicated-policy", "master of ")]
)
def test_all_ranks_refuse_to_save_what_is_not_finite_on_one(name: str, prefix: str, two_ranks: Any) -> None:
    first, second = (rank[name]["poisoned"] for rank in two_ranks[1])
    assert first == second
    assert first["names"] == [f"{prefix}model.norm.weight"]
    assert f"'{prefix}model.norm.weight' of the model" in first["refusal"]
    assert not first["saved"]
