"""Three steps of GRPO and of PPO on the tiny model, number by number, against what an earlier version logged.

A change that is meant to change nothing must leave these numbers alone. One that changes them on purpose renews them and
shows the difference in its own diff:

    python -m tests.golden.renew

Counts (rows, lengths, scores of sampled responses) must be exact: sampling draws by inverse CDF in float64, so another CPU,
whose matrix products sum in another order (relative 1e-6 in float32), draws another token only where a uniform number
falls that close to a boundary. Losses and norms pass through three updates by Adam, which divides by the size of a gradient
and so magnifies that rounding about a hundredfold: a share of 1e-3 holds on every CPU, and a wrong denominator, sign or
alignment is far outside.
"""

import json
import math
from pathlib import Path

import pytest

from tests.e2e.runs import logged, tiny_run

FOLDER = Path(__file__).parent
RUNS = {
    "grpo": [
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "trainer.critic_warmup=1",
    ],
}
EXACT = ("step", "training/global_step", "training/epoch", "training/num_", "response_length", "prompt_length")
EXACT += ("response/", "reward/", "critic/score/", "actor/skipped_updates", "critic/skipped_updates")
# How far two engines' rounding is apart is itself rounding.
ROUNDING = ("training/rollout_probs_diff", "training/rollout_actor_probs", "rollout_corr/chi2")


def golden_run(name: str, folder: Path) -> list[dict[str, float]]:
    """The metrics of three steps in float32, one thread of random numbers, one process."""
    float32 = ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model"]
    tiny_run(
        folder,
        "data.train_max_samples=-1",
        "trainer.seed=7",
        "trainer.device=cpu",
        "trainer.controller=local",
        *(f"{section}.fsdp_config.dtype=float32" for section in float32),
        *RUNS[name],
    )
    return logged(folder)


def assert_as_before(found: list[dict[str, float]], name: str, rel: float = 1e-3) -> None:
    """Compares steps with those in ``NAME.json``: what must be exact, what is rounding itself, and the rest up to ``rel``."""
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            where = f"step {theirs['step']}, {key}"
            if key.startswith(EXACT):
                assert math.isclose(ours[key], value, rel_tol=1e-6), where
            elif key.startswith(ROUNDING):
                assert abs(ours[key] - value) < 1e-4, where
            else:
                assert ours[key] == pytest.approx(value, rel=rel, abs=1e-6), where


@pytest.mark.parametrize("name", RUNS)
def test_three_steps_give_the_numbers_they_gave_before(name, tmp_path):
    assert_as_before(golden_run(name, tmp_path), name)
