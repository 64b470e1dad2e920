"""What a loss decides over a mini-batch is the same however the mini-batch is cut or spread, and reaches the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config import RolloutCorrectionConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.engine.ranks import AllRanks
from burnish.workers.preparation import make_preparation, prepared_arguments
from tests.engine.engine_program import make_engine, run_ranks
from tests.workers import update_program
from tests.workers.update_program import PREPARED, TEMPERATURE, actor_config, run_case, update, update_batch

CASES = [
    {"name": f"{loss}-{layout}", "loss_mode": loss, "fsdp_size": size, "num_rows": rows}
    | {"micro_batch_size": 2, "dtype": "float64"}
    for loss in PREPARED
    for layout, size, rows in (("sharded", -1, 8), ("replicated", 1, 7))
]
# Both ranks have all rows, each of which counts once.
CASES += [case | {"name": f"{case['name']}-shared-tokens", "sequence_parallel": 2} for case in CASES]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("two"), CASES, program=Path(update_program.__file__))


@pytest.mark.parametrize("case", CASES, ids=[str(case["name"]) for case in CASES])
def test_two_ranks_take_the_steps_of_one(case: dict[str, Any], two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    one = run_case(case | {"micro_batch_size": 8, "sequence_parallel": 1}, tmp_path)
    for rank in two_ranks:
        two = rank[case["name"]]
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-7, abs=1e-9)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(two["weights"][name], weight, atol=1e-9, rtol=0)


def prepared_of(loss_mode: str, **batch_changes: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    engine = make_engine(dtype="float64")
    rows = update_batch(engine)
    for key, tensor in batch_changes.items():
        rows.tensors[key] = tensor
    prepare = make_preparation(
        actor_config(loss_mode), engine, temperature=TEMPERATURE, batching={"micro_batch_size": 3}
    )
    assert prepare is not None
    prepare(rows)
    return rows, prepared_arguments(rows.tensors)


def test_losses_that_need_no_preparation_cost_no_pass() -> None:
    engine = make_engine()
    plain_bypass = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=RolloutCorrectionConfig())
    for config in (actor_config("vanilla"), actor_config(policy_loss=plain_bypass)):
        assert make_preparation(config, engine, temperature=1.0, batching={}) is None


def test_the_tokens_left_out_are_those_of_the_smallest_noise() -> None:
    shape = (8, 7)
    forwards = torch.arange(56.0).view(shape) / 56
    # Noise in the opposite order leaves out other tokens.
    _, first = prepared_of("clip_cov", choice_noise=forwards)
    rows, last = prepared_of("clip_cov", choice_noise=1 - forwards - 1e-6)
    assert set(first) == {"keep"}
    num_tokens = int(rows.tensors["loss_mask"].sum())
    for each in (first["keep"], last["keep"]):
        assert int((~each).sum()) == int(0.1 * num_tokens) > 1
        assert not bool((~each & ~rows.tensors["loss_mask"]).any())
    assert int((~first["keep"]).nonzero()[:, 0].max()) < int((~last["keep"]).nonzero()[:, 0].min())


def test_a_rejected_token_leaves_the_loss_mask_and_its_denominator() -> None:
    engine = make_engine(dtype="float64")
    before = int(update_batch(engine).tensors["loss_mask"].sum())
    rows, arguments = prepared_of("bypass_mode")
    after = int(rows.tensors["loss_mask"].sum())
    assert 0 < after < before
    assert engine.global_batch_info(rows)["batch_num_tokens"] == after
    weights = arguments["rollout_is_weights"][rows.tensors["loss_mask"]]
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-6)


def test_the_batch_that_was_planned_stays_as_it_was() -> None:
    engine = make_engine()
    batch = update_batch(engine)
    kept = {str(key): tensor.clone() for key, tensor in batch.tensors.items()}
    update(engine, batch, actor_config("bypass_mode"))
    assert set(map(str, batch.tensors.keys())) == set(kept)
    assert all(torch.equal(batch.tensors[key], tensor) for key, tensor in kept.items())


def test_without_old_log_probs_the_ratio_is_one() -> None:
    engine = make_engine()
    batch = update_batch(engine)
    del batch.tensors["old_log_probs"]
    metrics, _ = update(engine, batch, actor_config("clip_cov", ppo_mini_batch_size=4))
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/clip_cov_frac"] > 0


def test_on_one_rank_the_collective_gives_back_what_it_gets() -> None:
    ranks = AllRanks(torch.device("cpu"))
    values = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert ranks.sum(values).tolist() == [1.0, 2.0, 3.0]
    assert ranks.sum(values).dtype == torch.float64
    assert ranks.gather(values) is values
