"""Ranks that share the tokens of a packed row have the outputs and, averaged, the gradient of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from burnish.model.sequence_parallel import check_can_share
from burnish.utils.errors import ConfigError
from tests.engine.engine_program import run_ranks
from tests.model import sequence_parallel_program as program


def of_model(model: str, kind: str = "policy", dtype: str = "float64", **more: Any) -> dict[str, Any]:
    name = "-".join([model, kind, dtype, *(f"{key}={value}" for key, value in more.items())])
    return {"name": name, "model": model, "kind": kind, "dtype": dtype} | more


def of_attention(heads: tuple[int, int], window: int | None = None, softcap: float | None = None) -> dict[str, Any]:
    return {
        "name": f"{heads[0]}q-{heads[1]}kv-{window}-{softcap}",
        "heads": heads,
        "window": window,
        "softcap": softcap,
    }


FLOAT32 = ("llama_4q_1kv", "qwen3", "mistral_sliding", "gemma2_softcaps", "qwen3_moe")
CASES = [
    # torch's grouped products have no float64.
    *(of_model(name) for name in program.CONFIGS if name != "qwen3_moe"),
    *(of_model(name, dtype="float32") for name in FLOAT32),
    *(of_model("llama_4q_1kv", "value", dtype) for dtype in ("float64", "float32")),
    # One token in all: every rank but the first has none of it, and no label.
    of_model("llama", num_rows=1),
    of_model("gemma2_softcaps", recompute=True),
    # The state that predicts the first tokens of several responses lies on one rank.
    of_model("llama_4q_1kv", shared_prompts=True),
    of_model("mistral_sliding", shared_prompts=True),
    *(of_attention(heads) for heads in ((4, 4), (4, 2), (4, 1), (12, 6), (8, 1))),
    of_attention((8, 2), window=3),
    of_attention((12, 3), softcap=2.0),
]
NAMES = [case["name"] for case in CASES]


def tolerance_of(case: dict[str, Any]) -> float:
    if case["dtype"] == "float32":
        return 1e-5
    # These families' norms multiply by their weights in float32, whose gradients are float32 sums over the tokens.
    return 1e-7 if case["model"].startswith(("gemma", "cohere")) else 1e-10


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return {case["name"]: program.run_case(case, Path()) for case in CASES}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp(f"ranks{request.param}")
    return run_ranks(out, CASES, world=request.param, program=Path(program.__file__))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (difference / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "model" in case])
def test_outputs_and_gradient_are_those_of_one_rank(name: str, ranks: Any, one_rank: Any) -> None:
    expected, tolerance = one_rank[name], tolerance_of(next(case for case in CASES if case["name"] == name))
    for rank in ranks:
        assert distance(rank[name]["outputs"], expected["outputs"]) < tolerance
        assert distance(rank[name]["gradients"], expected["gradients"]) < tolerance
        for output, value in rank[name]["outputs"].items():
            assert torch.equal(value, ranks[0][name]["outputs"][output])


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "model" in case])
def test_tokens_are_shared_evenly_and_every_label_is_computed_once(name: str, ranks: Any, one_rank: Any) -> None:
    num_tokens = one_rank[name]["num_tokens"]
    assert [rank[name]["num_tokens"] for rank in ranks] == [-(-num_tokens // len(ranks))] * len(ranks)
    assert sum(rank[name]["num_labels"] for rank in ranks) == one_rank[name]["num_labels"]


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "model" in case])
def test_the_pairs_that_ranks_attend_to_are_those_of_one(name: str, ranks: Any, one_rank: Any) -> None:
    assert sum(rank[name]["num_pairs"] for rank in ranks) == one_rank[name]["num_pairs"]


def test_a_rank_may_be_without_labels(ranks: Any) -> None:
    assert [rank["llama-policy-float64-num_rows=1"]["num_labels"] for rank in ranks] == [1] + [0] * (len(ranks) - 1)


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "heads" in case])
def test_attention_and_its_gradient_are_those_of_one_rank(name: str, ranks: Any, one_rank: Any) -> None:
    for rank in ranks:
        for part, expected in one_rank[name].items():
            torch.testing.assert_close(rank[name][part], expected, atol=1e-12, rtol=0)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work() -> None:
    check_can_share(program.CONFIGS["llama_12q_6kv"], 4)
    check_can_share(program.CONFIGS["llama_12q_6kv"], 1)
    with pytest.raises(ConfigError, match=r"size=8: the 12 attention heads .* Sizes that work: 1, 2, 3, 4, 6, 12\."):
        check_can_share(program.CONFIGS["llama_12q_6kv"], 8)


def test_positions_that_hang_on_the_longest_row_are_refused() -> None:
    config = LlamaConfig(
        num_attention_heads=4, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    check_can_share(config, 1)
    with pytest.raises(ConfigError, match=r"rope_type=dynamic"):
        check_can_share(config, 2)
