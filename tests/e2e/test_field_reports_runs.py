"""How whole runs go wrong in the field: temperatures, ratios, and gradients that are not a number."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from burnish.utils.errors import TrainingError
from tests.e2e import poisoned_loss
from tests.e2e.runs import logged, tiny_run


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_rollout_and_trainer_agree_at_any_temperature(tmp_path, temperature):
    tiny_run(
        tmp_path,
        "trainer.total_training_steps=1",
        f"actor_rollout_ref.rollout.temperature={temperature}",
        # Two updates, so that the trainer has a pass of its own before them.
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    (metrics,) = logged(tmp_path)
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    assert metrics["rollout_corr/k3_kl"] < 1e-6


def test_the_ratio_is_one_in_a_run_that_never_moves(tmp_path):
    """Passes and updates in micro-batches of different sizes, several updates per batch, rate 0."""
    tiny_run(
        tmp_path,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        # One step outside [1 - 1e-5, 1 + 1e-5] would be counted.
        "actor_rollout_ref.actor.clip_ratio=1e-5",
    )
    (metrics,) = logged(tmp_path)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert abs(metrics["actor/ppo_kl"]) < 1e-5


@pytest.fixture
def poisoned():
    """The loss of `poisoned_loss` by its name in the configuration; the set says in which updates it is NaN."""
    poisoned_loss.UPDATES.clear()
    poisoned_loss.POISONED.clear()
    yield poisoned_loss.POISONED
    poisoned_loss.POISONED.clear()


POISONED_RUN = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=tests.e2e.poisoned_loss:poisoned",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "trainer.controller=local",
    "trainer.save_freq=1",
)


def policy_at(run_dir, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"global_step_{step}" / "actor" / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_one_gradient_of_nan_is_skipped_once_and_the_run_goes_on(tmp_path, poisoned):
    poisoned.add(3)
    tiny_run(tmp_path, "trainer.total_training_steps=4", *POISONED_RUN)
    metrics = logged(tmp_path)
    assert [step["actor/skipped_updates"] for step in metrics] == [0, 0, 1, 0]
    rate = metrics[0]["actor/lr"]
    assert [step["actor/lr"] for step in metrics] == pytest.approx([rate, 2 * rate, 3 * rate, 4 * rate])
    saved = [policy_at(tmp_path, step) for step in range(1, 5)]
    assert [equal(before, after) for before, after in pairwise(saved)] == [False, True, False]


def test_gradients_of_nan_without_an_end_stop_the_run_and_the_last_good_checkpoint_stays(tmp_path, poisoned):
    poisoned.update(range(3, 100))
    with pytest.raises(TrainingError, match="Step 4: the actor was not updated in 2 steps in a row"):
        tiny_run(
            tmp_path,
            "trainer.total_training_steps=50",
            "trainer.max_skipped_updates=1",
            "trainer.max_actor_ckpt_to_keep=1",
            *POISONED_RUN,
        )
    folders = sorted(folder.name for folder in tmp_path.glob("global_step_*"))
    assert folders == ["global_step_3"]
    assert all(weight.isfinite().all() for weight in policy_at(tmp_path, 3).values())
    assert (tmp_path / "failed_batch_step_4").exists()
    # What it holds goes on as if nothing had happened.
    poisoned.clear()
    summary = tiny_run(tmp_path, "trainer.total_training_steps=4", "trainer.resume_mode=auto", *POISONED_RUN)
    assert summary.steps == 4
    assert logged(tmp_path)[-1]["actor/skipped_updates"] == 0
