"""A run that was stopped and resumed is the run that was not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import logged, tiny_run

PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.total_training_steps=4",
]
GRPO = ["actor_rollout_ref.actor.use_kl_loss=true"]
# Two batches of eight an epoch: step 2 is an epoch's last one, step 3 lies inside the second.
COMMON = ["trainer.save_freq=1", "trainer.resume_mode=auto", "data.train_max_samples=16", "data.shuffle=true"]


def assert_equal_files(one: Path, other: Path) -> None:
    """Weights and moments are the same to the bit."""
    for role in ("actor", "critic"):
        if not (one / role).exists():
            continue
        for file in sorted((one / role).glob("*.safetensors")):
            ours, theirs = load_file(file), load_file(other / role / file.name)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
        ours, theirs = (torch.load(folder / role / "optimizer.pt", weights_only=True) for folder in (one, other))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert all(torch.equal(ours[name][key], theirs[name][key]) for key in ours[name]), name
    assert (one / "trainer_state.json").read_text() == (other / "trainer_state.json").read_text()


@pytest.mark.parametrize("stop", [2, 3], ids=["at-an-epochs-end", "inside-an-epoch"])
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, algorithm, stop):
    overrides = [*COMMON, *algorithm]
    tiny_run(tmp_path / "whole", "trainer.total_training_steps=4", *overrides)
    tiny_run(tmp_path / "parts", f"trainer.total_training_steps={stop}", *overrides)
    assert tiny_run(tmp_path / "parts", "trainer.total_training_steps=4", *overrides).steps == 4
    whole = logged(tmp_path / "whole")
    assert [metrics["training/epoch"] for metrics in whole] == [0, 0, 1, 1]
    assert whole == logged(tmp_path / "parts")
    assert_equal_files(tmp_path / "whole" / "global_step_4", tmp_path / "parts" / "global_step_4")


@pytest.mark.parametrize("last", [2, 1])
def test_a_run_that_is_past_its_last_step_says_so_and_ends(tmp_path, caplog, last):
    tiny_run(tmp_path, "trainer.total_training_steps=2", *COMMON)
    tiny_run(tmp_path, f"trainer.total_training_steps={last}", *COMMON)
    assert "Nothing to train: the checkpoint is of step 2" in caplog.text
    assert len(logged(tmp_path)) == 2


def test_one_rank_goes_on_where_two_stopped(tmp_path):
    two_ranks = ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]
    tiny_run(tmp_path / "whole", "trainer.total_training_steps=2", *COMMON, *PPO)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=1", *COMMON, *PPO, *two_ranks)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=2", *COMMON, *PPO)
    for key in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty_coeff"):
        assert logged(tmp_path / "parts")[1][key] == pytest.approx(logged(tmp_path / "whole")[1][key], rel=2e-3), key


def test_the_saved_configuration_says_what_was_asked_for_and_not_what_followed_from_it(tmp_path):
    tiny_run(tmp_path, "trainer.total_training_steps=1")
    assert "total_training_steps: -1" in (tmp_path / "config.yaml").read_text()
