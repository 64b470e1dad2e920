"""The batch plan states one step in prompts, samples, updates and tokens."""

from burnish.config import batch_plan, load_config

ACTOR = "actor_rollout_ref.actor"
BASE = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=5"]


def test_eight_prompts_of_five_responses_are_forty_samples_in_two_updates_of_twenty():
    plan = batch_plan(load_config([*BASE, "algorithm.adv_estimator=grpo"]), world_size=2)
    assert (plan.samples, plan.actor.updates, plan.actor.samples, plan.actor.samples_per_worker) == (40, 2, 20, 10)
    assert plan.critic is None
    text = plan.render()
    assert "8 prompts x 5 responses = 40 samples on 2 workers" in text
    assert "2 updates of 4 prompts = 20 samples (10 per worker" in text
    assert "at most 16,384 tokens" in text


def test_passes_multiply_the_updates_and_a_critic_has_its_own_line():
    plan = batch_plan(
        load_config([*BASE, f"{ACTOR}.ppo_epochs=3", "critic.ppo_micro_batch_size_per_gpu=4"]), world_size=1
    )
    assert plan.actor.updates == plan.critic.updates == 6
    assert plan.critic.micro_batch_samples == 4
    assert (
        "critic   6 updates of 4 prompts = 20 samples (20 per worker, in micro-batches of 4 samples)" in plan.render()
    )


def test_the_plan_says_where_the_kl_goes():
    assert "no reference policy" in batch_plan(load_config([]), 1).render()
    both = load_config([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"])
    assert "in the reward (kl, fixed 0.001) and in the loss (low_var_kl, 0.001)" in batch_plan(both, 1).render()
