"""FSDP2's options change where state lies and when ranks talk, and no number; one rank reads a model for all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from burnish.config import FSDPEngineConfig
from burnish.engine import state_bytes
from burnish.engine.layout import Sharded
from burnish.model.load import build_causal_lm
from burnish.model.policy import PolicyModule
from burnish.utils.errors import ConfigError
from tests.engine.engine_program import run_ranks, tiny_config
from tests.engine.memory_program import PROGRAM, run_memory_case
from tests.engine.test_ranks import TOLERANCE, distance

STEPS: dict[str, Any] = {"micro_batch_size": 2, "uneven": True}


def case(name: str, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, **more}


TRAINED = [
    case("plain", "float64", **STEPS, fsdp_keys={"defer_gradient_sync": False}),
    case("deferred", "float64", **STEPS, fsdp_keys={"defer_gradient_sync": True}),
    case("deferred bfloat16", "bfloat16", **STEPS, fsdp_keys={"defer_gradient_sync": True}),
    case("on the CPU", "float64", **STEPS, fsdp_keys={"offload_policy": True}),
    case("not resharded", "float64", **STEPS, fsdp_keys={"reshard_after_forward": False, "forward_prefetch": True}),
    case(
        "parked",
        "float64",
        **STEPS,
        fsdp_keys={"param_offload": True, "optimizer_offload": True, "defer_gradient_sync": False},
        offload_on_cpu=True,
    ),
    case("block by block", "float64", **STEPS, unit_parameters=0),
    case("recomputed", "float64", **STEPS, gradient_checkpointing=True),
    case("automatic", "float64", **STEPS, gradient_checkpointing="auto"),
    case(
        "activations parked",
        "float64",
        **STEPS,
        gradient_checkpointing=True,
        model_keys={"enable_activation_offload": True},
        offload_on_cpu=True,
    ),
]
NAMES = [each["name"] for each in TRAINED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tied model on disk, with two tokens that end a response."""
    path = tmp_path_factory.mktemp("model")
    model = build_causal_lm(tiny_config(eos_token_id=[2, 5]))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(path)
    return str(path)


def loading_cases(folder: str) -> list[dict[str, Any]]:
    other = {"override_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}}
    return [
        case("read", what="load", path=folder),
        case("read replicated", what="load", path=folder, fsdp_size=1),
        case("read bfloat16", "bfloat16", what="load", path=folder, trained=False),
        case("read critic", what="load", path=folder, module="value"),
        case("read overridden", what="load", path=folder, model_keys=other),
        case("read with adapters", what="load", path=folder, model_keys={"lora_rank": 4}),
        case("read everywhere", what="load", path=folder, no_skeleton=True),
        case("read nowhere", what="fail", path=folder + "/nothing"),
    ]


COUNTED = [
    case("reduced", what="sync", fsdp_keys={"defer_gradient_sync": False}),
    case("reduced once", what="sync", fsdp_keys={"defer_gradient_sync": True}),
    case("gathered", what="prefetch", unit_parameters=0),
    # The head's 49 rows do not divide: the first rank holds one more.
    case("uneven plans", what="plan", gradient_checkpointing="auto", sequence_parallel=2, config={"vocab_size": 49}),
    case("alike", what="defer", memory=[1 << 40, 1 << 40]),
    case("unlike", what="defer", memory=[1 << 40, 1 << 10]),
    case("gathered early", what="prefetch", unit_parameters=0, fsdp_keys={"forward_prefetch": True}),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, folder: str) -> list[dict[str, Any]]:
    """Every case on two ranks, in one start of two processes."""
    out = tmp_path_factory.mktemp("two_ranks")
    return run_ranks(out, [*TRAINED, *COUNTED, *loading_cases(folder)], program=PROGRAM)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one rank with nothing special computes, in other micro-batches."""
    out = tmp_path_factory.mktemp("one_rank")
    return {dtype: run_memory_case(case("", dtype, micro_batch_size=3), out) for dtype in ("float64", "bfloat16")}


@pytest.mark.parametrize("name", NAMES)
def test_wherever_state_lies_the_gradient_and_weights_are_those_of_one_rank(
    name: str, two_ranks: Any, one_rank: Any
) -> None:
    dtype = next(each["dtype"] for each in TRAINED if each["name"] == name)
    for rank in two_ranks:
        assert distance(rank[name]["gradients"], one_rank[dtype]["gradients"]) < TOLERANCE[dtype]
        for weights in ("weights", "later"):
            assert distance(rank[name][weights], one_rank[dtype][weights]) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_on_to_the_bit_wherever_state_lies(name: str, two_ranks: Any) -> None:
    assert all(rank[name]["resumed_alike"] for rank in two_ranks)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stays_gathered_after_a_pass_without_gradient(name: str, two_ranks: Any) -> None:
    # What is gathered is no master: it cannot be saved, and whoever loads would leave it as it was.
    assert all(rank[name]["whole"] == [] for rank in two_ranks)


def test_ranks_that_share_tokens_recompute_the_same_blocks_whatever_they_hold(two_ranks: Any) -> None:
    plans = [rank["uneven plans"] for rank in two_ranks]
    assert plans[0]["fixed"][0] > plans[0]["fixed"][1]
    for plan in plans:
        assert plan["tokens"][0] == plan["tokens"][1]
        assert plan["recomputed"] == 1


def test_gradients_are_deferred_only_where_every_rank_has_the_memory(two_ranks: Any) -> None:
    assert [rank["alike"]["defers"] for rank in two_ranks] == [True, True]
    assert [rank["unlike"]["defers"] for rank in two_ranks] == [False, False]


def test_state_that_is_fetched_for_its_uses_gives_the_same_bits(two_ranks: Any) -> None:
    for rank in two_ranks:
        for key in ("weights", "later", "gradients", "log_probs"):
            mine, plain = rank["parked"][key], rank["plain"][key]
            assert all(torch.equal(mine[name], tensor) for name, tensor in plain.items())


def test_parked_shards_and_moments_hold_no_memory_between_uses(two_ranks: Any) -> None:
    for rank in two_ranks:
        assert rank["plain"]["away"] == {"weights": 0, "masters": 0, "moments": 0}
        away = rank["parked"]["away"]
        shard = sum(weight.nbytes for weight in rank["parked"]["weights"].values()) / 2
        assert away["weights"] == pytest.approx(shard, rel=0.05)
        assert away["moments"] == 2 * away["weights"]


def test_deferred_gradients_are_reduced_once_and_are_the_same(two_ranks: Any) -> None:
    for rank in two_ranks:
        # Three micro-batches; two blocks and the root.
        assert rank["reduced once"]["reductions"] * 3 == rank["reduced"]["reductions"]
        assert distance(rank["reduced once"]["gradients"], rank["reduced"]["gradients"]) < 1e-6


def test_small_blocks_are_gathered_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [nn.Linear(10, 1, bias=False) for _ in range(5)] + [nn.Linear(100, 1), nn.Linear(5, 1)]
    for most, sizes in {0: [1] * 7, 20: [2, 2, 1, 1, 1], 1000: [7]}.items():
        monkeypatch.setattr(state_bytes, "_UNIT_PARAMETERS", most)
        units = state_bytes.units(list(blocks))
        assert [len(unit) for unit in units] == sizes
        assert [block for unit in units for block in unit] == blocks


def test_forward_prefetch_asks_for_each_block_while_the_one_before_computes(two_ranks: Any) -> None:
    for rank in two_ranks:
        assert rank["gathered"]["early"] == []
        layers = [f"FSDP::forward_prefetch for model.model.layers.{index}" for index in range(2)]
        assert rank["gathered early"]["early"] == layers
        assert torch.equal(rank["gathered early"]["log_probs"], rank["gathered"]["log_probs"])


@pytest.mark.parametrize(
    "name",
    [
        "read",
        "read replicated",
        "read bfloat16",
        "read critic",
        "read overridden",
        "read with adapters",
        "read everywhere",
    ],
)
def test_ranks_that_receive_a_model_have_it_to_the_bit(name: str, two_ranks: Any, folder: str, tmp_path: Path) -> None:
    alone = run_memory_case(next(each for each in loading_cases(folder) if each["name"] == name), tmp_path)
    assert [rank[name]["read"] for rank in two_ranks] == [True, name == "read everywhere"]
    for rank in two_ranks:
        for kind in ("weights", "buffers"):
            mine, expected = rank[name][kind], alone[kind]
            assert mine.keys() == expected.keys()
            assert all(torch.equal(mine[key], value) for key, value in expected.items()), kind
        # Where a tensor lies in memory decides how a library multiplies, and so the last bit.
        torch.testing.assert_close(rank[name]["log_probs"], alone["log_probs"])
        for key in ("tied", "eos", "training"):
            assert rank[name][key] == alone[key]
    assert name == "read critic" or (alone["tied"] and alone["eos"] == [2, 5])


def test_rotary_frequencies_follow_the_overridden_configuration(two_ranks: Any) -> None:
    buffers = [two_ranks[1][name]["buffers"] for name in ("read", "read overridden")]
    name = "model.model.rotary_emb.inv_freq"
    assert torch.equal(buffers[1][name], 1 / 77.0 ** (torch.arange(0, 8, 2) / 8))
    assert not torch.equal(buffers[0][name], buffers[1][name])


def test_a_model_that_rank_zero_cannot_load_is_the_same_error_on_every_rank(two_ranks: Any, folder: str) -> None:
    for rank in two_ranks:
        assert rank["read nowhere"]["kind"] == "ModelError"
        assert f"{folder}/nothing' does not exist" in rank["read nowhere"]["text"]


@pytest.mark.slow
def test_pairs_of_ranks_that_share_a_copy_reduce_over_all_four(tmp_path: Path, one_rank: Any) -> None:
    cases = [
        case(f"pairs {defers}", "float64", micro_batch_size=2, fsdp_size=2, fsdp_keys={"defer_gradient_sync": defers})
        for defers in (False, True)
    ]
    for rank in run_ranks(tmp_path, cases, world=4, program=PROGRAM):
        for result in rank.values():
            assert distance(result["gradients"], one_rank["float64"]["gradients"]) < 1e-10
            assert distance(result["later"], one_rank["float64"]["later"]) < 1e-9


def test_a_size_that_does_not_divide_the_workers_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_size=3: 1 workers cannot .* Set -1 \(all of them\) or one of 1\."):
        Sharded(
            PolicyModule(build_causal_lm(tiny_config())),
            torch.float32,
            torch.device("cpu"),
            fsdp_size=3,
            reshard_after_forward=FSDPEngineConfig().reshard_after_forward,
        )
