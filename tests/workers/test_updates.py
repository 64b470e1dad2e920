"""Optimizer steps that are none: a gradient that is no number, and mini-batches without a token to train on."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo.updates import SkippedUpdates
from burnish.utils.errors import TrainingError
from burnish.workers import updates
from burnish.workers.updates import merge_updates, perf_metrics
from tests.engine.engine_program import make_engine
from tests.workers.update_program import actor_config, update, update_batch

NAN = float("nan")


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_one_bad_step_is_skipped_counted_and_forgotten(tmp_path: Path) -> None:
    engine, watch = make_engine(lr_warmup_steps=10), SkippedUpdates(1, tmp_path)
    batch, states, rates = update_batch(engine), [weights(engine)], []
    for step in range(1, 6):
        metrics, num_updates = update(engine, batch, actor_config(), step=step, scale=NAN if step == 3 else 1.0)
        watch.watch("actor", metrics, num_updates, step, batch)
        states.append(weights(engine))
        rates.append(metrics["actor/lr"])
        assert metrics["actor/skipped_updates"] == (2.0 if step == 3 else 0.0)
        assert math.isfinite(metrics["actor/grad_norm"]) == (step != 3)
    unchanged = [equal(before, after) for before, after in pairwise(states)]
    assert unchanged == [False, False, True, False, False]
    # The skipped step has its place in the schedule.
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005])
    assert not list(tmp_path.iterdir())


def test_bad_steps_in_a_row_end_the_run_and_leave_the_batch(tmp_path: Path) -> None:
    engine, watch = make_engine(), SkippedUpdates(2, tmp_path / "run")
    batch = update_batch(engine)
    with pytest.raises(TrainingError, match="Step 5: the actor was not updated in 3 steps in a row") as error:  # noqa: PT012
        for step in range(1, 20):
            before = weights(engine)
            metrics, num_updates = update(engine, batch, actor_config(), step=step, scale=NAN if step >= 3 else 1.0)
            assert equal(before, weights(engine)) == (step >= 3)
            watch.watch("actor", metrics, num_updates, step, batch)
    file = tmp_path / "run" / "failed_batch_step_5"
    assert str(file) in str(error.value)
    dumped = DataProto.load_from_disk(str(file))
    assert dumped.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"].tolist()
    assert all(torch.equal(tensor, dumped.tensors[key]) for key, tensor in batch.tensors.items())


@pytest.mark.parametrize("loss_mode", ["vanilla", "clip_cov"])
def test_a_mini_batch_without_a_token_is_no_update(loss_mode: str) -> None:
    engine = make_engine()
    batch = update_batch(engine)
    batch.tensors["loss_mask"][:4] = False
    metrics, num_updates = update(engine, batch, actor_config(loss_mode))
    assert (num_updates, metrics["actor/empty_updates"]) == (1, 1.0)
    assert metrics["actor/grad_norm"] > 0


def reject_all_but(batch: DataProto, rows: list[int]) -> None:
    """The rollout's probabilities are the trainer's in ``rows`` and far from it elsewhere."""
    far = torch.full_like(batch.tensors["old_log_probs"], -30.0)
    kept = torch.zeros(len(batch), 1, dtype=torch.bool)
    kept[rows] = True
    own = batch.tensors["old_log_probs"]
    batch.tensors["old_log_probs"] = torch.where(kept, own, far)


def test_a_mini_batch_that_the_loss_rejects_whole_is_no_update() -> None:
    engine = make_engine()
    batch = update_batch(engine)
    reject_all_but(batch, [4, 5, 6, 7])
    metrics, num_updates = update(engine, batch, actor_config("bypass_mode"))
    assert (num_updates, metrics["actor/empty_updates"]) == (1, 1.0)
    alone = make_engine()
    expected, _ = update(alone, batch[4:], actor_config("bypass_mode"))
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-5)


@pytest.mark.parametrize("ppo_epochs", [1, 2])
def test_a_step_in_which_everything_is_rejected_has_counts_alone_and_is_one_without_an_update(
    tmp_path: Path, ppo_epochs: int
) -> None:
    engine, watch = make_engine(), SkippedUpdates(1, tmp_path)
    batch, before = update_batch(engine), weights(engine)
    reject_all_but(batch, [])
    metrics, num_updates = update(engine, batch, actor_config("bypass_mode", ppo_epochs=ppo_epochs))
    assert metrics == {"actor/skipped_updates": 0.0, "actor/empty_updates": 2.0 * ppo_epochs}
    assert num_updates == 0
    assert equal(before, weights(engine))
    watch.watch("actor", metrics, num_updates, 1, batch)
    with pytest.raises(TrainingError, match="had no token to train on"):
        watch.watch("actor", metrics, num_updates, 2, batch)


def test_a_policy_that_is_no_number_skips_its_update_whatever_the_loss() -> None:
    for loss_mode in ("vanilla", "clip_cov", "kl_cov"):
        engine = make_engine()
        batch = update_batch(engine)
        del batch.tensors["old_log_probs"]
        name, weight = next(iter(engine.named_weights()))
        weight.fill_(NAN)
        metrics, num_updates = update(engine, batch, actor_config(loss_mode))
        assert metrics["actor/skipped_updates"] == num_updates == 2, (loss_mode, name)


def test_merged_metrics_take_each_name_from_the_parts_that_have_it() -> None:
    parts = [{"actor/empty_updates": 2.0, "perf/mfu/actor": 0.1}, {"actor/empty_updates": 0.0, "actor/loss": 3.0}]
    assert merge_updates(parts, [0, 2]) == {"actor/empty_updates": 2.0, "perf/mfu/actor": 0.1, "actor/loss": 3.0}


def test_the_difference_to_the_rollout_is_that_before_the_first_update() -> None:
    parts = [{"training/rollout_probs_diff_max": 0.1, "a": 1.0}, {"training/rollout_probs_diff_max": 0.5, "a": 3.0}]
    assert merge_updates(parts) == {"training/rollout_probs_diff_max": 0.1, "a": 2.0}


def test_utilisation_is_of_everything_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "device_peak_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr(updates, "used_memory_bytes", lambda: None)
    engine = make_engine()
    # This loss has a pass of its own before each update.
    update(engine, update_batch(engine), actor_config("kl_cov"))
    flops = engine.take_flops()
    assert flops > 0
    engine._flops = flops
    assert perf_metrics(engine, name="actor", seconds=2.0) == {"perf/mfu/actor": pytest.approx(flops / 2e6)}
    assert perf_metrics(engine, name="actor", seconds=2.0) == {"perf/mfu/actor": 0.0}
    update(engine, update_batch(engine), actor_config("vanilla"))
    assert engine.take_flops() < flops
