"""Every recipe trains: finite, by the estimator and the loss that its name says, and with a use for each of its keys."""

import math
import shutil
from pathlib import Path

import pytest

from burnish.config import load_config
from burnish.config.load import RECIPES
from burnish.config.usage import unread
from burnish.core_algos import advantages
from burnish.trainer.main_ppo import run_ppo
from burnish.workers import losses
from tests.e2e.runs import TINY, logged

STEPS = 2
# Recipe: estimator, loss, and a metric that tells what is special about it, where there is one.
EXPECTED = {
    "ppo": ("gae", "vanilla", "critic/vf_loss"),
    "grpo": ("grpo", "vanilla", "actor/kl_loss"),
    "dr_grpo": ("grpo", "vanilla", "actor/pg_clipfrac_lower"),
    "dapo": ("grpo", "vanilla", "filter_groups/kept_prompts"),
    "rloo": ("rloo", "vanilla", "actor/reward_kl_penalty"),
    "reinforce_pp": ("reinforce_plus_plus", "vanilla", "actor/reward_kl_penalty"),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline", "vanilla", "actor/kl_loss"),
    "remax": ("remax", "vanilla", "reward/baseline_mean"),
    "opo": ("opo", "vanilla", "actor/pg_clipfrac_lower"),
    "gpg": ("gpg", "gpg", "actor/ppo_kl"),
    "grpo_passk": ("grpo_passk", "vanilla", "actor/pg_clipfrac_lower"),
    "gdpo": ("gdpo", "vanilla", "reward/gdpo_incomplete_count"),
    "otb": ("optimal_token_baseline", "vanilla", "actor/pg_clipfrac_lower"),
    "gspo": ("grpo", "gspo", "actor/pg_clipfrac"),
    "sapo": ("grpo", "sapo", "actor/sapo_gate"),
    "cispo": ("grpo", "cispo", "actor/pg_clipfrac"),
    "geo_mean": ("grpo", "geo_mean", "actor/pg_clipfrac"),
    "clip_cov": ("grpo", "clip_cov", "actor/clip_cov_frac"),
    "kl_cov": ("grpo", "kl_cov", "actor/kl_cov_frac"),
    "dppo": ("grpo", "dppo_tv", "actor/dppo_truncated_frac"),
    "dro": ("grpo", "dro", "actor/dro_penalty"),
    "pf_ppo": ("gae", "vanilla", "pf_ppo/num_distinct_rows"),
    "token_is": ("grpo", "vanilla", "rollout_corr/rollout_is_mean"),
    "bypass": ("grpo", "bypass_mode", "actor/pg_clipfrac"),
}
# With one update per batch, and in bypass mode, the trainer makes no pass for the old log-probs.
WITHOUT_PASS = {"opo", "bypass"}
NOT_OF_AN_ALGORITHM = {"demo", "ppo_trainer"}


def train(recipe: str, tmp_path: Path):
    """Two steps of the recipe on the tiny model, of two updates where it leaves that open; returns the configuration.

    The recipe is used as a file of the user's own, since keys of burnish's recipes are never listed as unread.
    """
    shutil.copy(RECIPES / f"{recipe}.yaml", tmp_path / f"my_{recipe}.yaml")
    sizes = {
        "data.train_batch_size": 8,
        # Rendering thousands of rows would take longer than the steps.
        "data.train_max_samples": 256,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.rollout.n": 1 if recipe in ("ppo", "remax", "reinforce_pp") else 4,
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "reward.num_workers": 0,
    }
    if recipe in ("ppo", "pf_ppo"):
        sizes["critic.optim.lr"] = 1e-3
    if recipe != "opo":
        sizes["actor_rollout_ref.actor.ppo_mini_batch_size"] = 4
    if recipe == "dapo":
        sizes["reward.reward_kwargs.overlong_buffer_cfg.len"] = 4
    places = {
        "actor_rollout_ref.model.path": TINY / "model",
        "data.train_files": TINY / "data" / "train.jsonl",
        "data.val_files": None,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.total_training_steps": STEPS,
        "trainer.logger": ["file"],
        "trainer.val_before_train": False,
    }
    config = load_config(sizes | places, config_name=f"my_{recipe}", config_path=str(tmp_path))
    run_ppo(config, quiet=True)
    return config


@pytest.fixture
def used(monkeypatch):
    """The estimators and losses that a run asks for, by name."""
    names = {"estimator": set(), "loss": set()}

    def watch(kind, module, getter):
        get = getattr(module, getter)

        def watched(name):
            names[kind].add(str(name))
            return get(name)

        monkeypatch.setattr(module, getter, watched)

    watch("estimator", advantages, "get_adv_estimator_fn")
    watch("loss", losses, "get_policy_loss_fn")
    return names


def test_every_recipe_is_expected_to_train_in_some_way():
    assert set(EXPECTED) | NOT_OF_AN_ALGORITHM == {file.stem for file in RECIPES.glob("*.yaml")}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_a_recipe_trains_by_what_it_names_and_reads_every_key(tmp_path, used, recipe):
    estimator, loss, metric = EXPECTED[recipe]
    config = train(recipe, tmp_path)
    metrics = logged(tmp_path / "run")
    assert len(metrics) == STEPS
    for step in metrics:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
        assert step["actor/grad_norm"] >= 0
        assert metric in step
        assert ("rollout_corr/training_ppl" in step) == (recipe not in WITHOUT_PASS)
    assert sum(step["actor/grad_norm"] for step in metrics) > 0
    assert used == {"estimator": {estimator}, "loss": {loss}}
    assert unread(config) == []
