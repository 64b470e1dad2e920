"""Two Ray workers take the steps that one process takes, and what must not be saved is not saved by either."""

import pytest
import torch

from burnish.engine.checkpoint import read_optimizer
from burnish.utils.errors import BurnishError
from tests.e2e.runs import logged
from tests.e2e.test_algorithm_runs import HOT, REJECTION, Disagreeing, Recorder, by_text, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_RANKS = ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]
LOSS = "actor_rollout_ref.actor.policy_loss"
STEPS = {
    "clip_cov": [f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_ratio=0.1", f"{LOSS}.clip_cov_lb=0"],
    "kl_cov": [f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=0.1"],
    "bypass": [
        *REJECTION,
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    ],
    "remax": ["algorithm.adv_estimator=remax"],
    "pf-ppo": ["algorithm.use_pf_ppo=true"],
    "gae": [*REJECTION, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
}


def first_moments(run_dir, role="actor"):
    """After one step of Adam they are a tenth of its gradient, which the weights themselves show by its sign alone."""
    state = read_optimizer(run_dir / "global_step_1" / role)
    return torch.cat([state[name]["exp_avg"].flatten() for name in sorted(state)])


@pytest.mark.parametrize("algorithm", STEPS)
def test_two_ranks_take_the_step_of_one(tmp_path, algorithm):
    for name, ranks in (("one", []), ("two", TWO_RANKS)):
        overrides = [*STEPS[algorithm], *ranks, HOT, "trainer.save_freq=1"]
        run(tmp_path / name, *overrides, reward_fn=by_text, steps=1, task_runner_class=Disagreeing)
    one, two = logged(tmp_path / "one")[0], logged(tmp_path / "two")[0]
    assert one == pytest.approx(two, rel=1e-3, abs=1e-4)
    for role in ("actor", "critic") if algorithm == "gae" else ("actor",):
        ours, theirs = first_moments(tmp_path / "one", role), first_moments(tmp_path / "two", role)
        assert (ours - theirs).norm() < 1e-4 * ours.norm() > 0, role


ACTOR_SHARES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
SHARED_TOKENS = {
    "clip_cov": [ACTOR_SHARES],
    # Reference and critic lie otherwise than the actor.
    "gae": [
        ACTOR_SHARES,
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
        "critic.ulysses_sequence_parallel_size=2",
    ],
}


@pytest.mark.parametrize("algorithm", SHARED_TOKENS)
def test_two_ranks_that_share_tokens_take_the_steps_of_one(tmp_path, algorithm):
    for name, ranks in (("one", []), ("two", [*TWO_RANKS, *SHARED_TOKENS[algorithm]])):
        overrides = [*STEPS[algorithm], *ranks, HOT, "trainer.save_freq=1"]
        run(tmp_path / name, *overrides, reward_fn=by_text, steps=2, task_runner_class=Disagreeing)
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert one[0] == pytest.approx(two[0], rel=1e-3, abs=1e-4)
    assert one[1] == pytest.approx(two[1], rel=1e-2, abs=1e-3)
    for role in ("actor", "critic") if algorithm == "gae" else ("actor",):
        ours, theirs = first_moments(tmp_path / "one", role), first_moments(tmp_path / "two", role)
        assert (ours - theirs).norm() < 1e-4 * ours.norm() > 0, role


# A rate that float32 does not hold moves every weight to an infinity.
FAR = "optim.lr=1e39"


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one", "two"])
@pytest.mark.parametrize("model", ["actor_rollout_ref.actor", "critic"])
def test_a_model_that_is_not_finite_is_not_saved(tmp_path, model, ranks):
    overrides = ["algorithm.adv_estimator=gae", f"{model}.{FAR}", "trainer.save_freq=1", *ranks]
    with pytest.raises(BurnishError, match=r"was not written: .* holds NaN or infinity"):
        run(tmp_path, *overrides, reward_fn=by_text, steps=3, task_runner_class=Recorder)
    assert not list(tmp_path.glob("*global_step_*"))
