"""The batch plan states one step in prompts, samples, updates and tokens, and the algorithm that it follows."""

import pytest

from burnish.config import batch_plan, load_config, needs_old_log_probs

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


def test_workers_that_share_tokens_share_samples_and_their_micro_batches_hold_more_tokens():
    sp = "ulysses_sequence_parallel_size"
    overrides = [*BASE, "trainer.n_gpus_per_node=4", f"{ACTOR}.{sp}=2", f"critic.{sp}=4"]
    plan = batch_plan(load_config(overrides), world_size=4)
    assert (plan.actor.samples_per_worker, plan.critic.samples_per_worker) == (10, 20)
    text = plan.render()
    assert "(10 per 2 workers that share their tokens, in micro-batches of at most 2 x 16,384 tokens)" in text
    assert "(20 per 4 workers that share their tokens, in micro-batches of at most 4 x 32,768 tokens)" in text


def test_the_plan_says_where_the_kl_goes():
    assert "no reference policy" in batch_plan(load_config([]), 1).render()
    both = load_config([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"])
    assert "in the reward (kl, fixed 0.001) and in the loss (low_var_kl, 0.001)" in batch_plan(both, 1).render()


def test_the_plan_says_that_a_policy_is_not_saved():
    lost = "saved    no checkpoint, so the policy ends with the run (trainer.save_freq=-1)"
    assert lost in batch_plan(load_config([]), 1).render()
    for saved in ("trainer.save_freq=5", "trainer.val_only=true"):
        assert "saved  " not in batch_plan(load_config([saved]), 1).render()


CORRECTION = "algorithm.rollout_correction"
ONE_UPDATE = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=5"]


def line(name: str, *overrides: str) -> str | None:
    """The line of the plan that is called ``name``."""
    text = batch_plan(load_config([*BASE, "algorithm.adv_estimator=grpo", *overrides]), 1).render()
    found = [line.strip() for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    assert len(found) <= 1
    return found[0].removeprefix(name).strip() if found else None


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([], "computed by the trainer before the updates (decoupled)"),
        ([f"{ACTOR}.ppo_mini_batch_size=8"], "the update's own: one update per batch, so no pass before it"),
        ([f"{CORRECTION}.bypass_mode=true"], "the rollout's, without a pass of the trainer (bypass)"),
        (
            [f"{CORRECTION}.preset=decoupled_token_is", f"{CORRECTION}.rollout_is_batch_normalize=true"],
            "computed by the trainer before the updates (decoupled); token weights up to 2, over their mean",
        ),
        (
            [f"{CORRECTION}.preset=bypass_pg_geo_rs_seq_tis"],
            "the rollout's, without a pass of the trainer (bypass); sequence weights up to 2; rejection by seq_mean_k1 "
            "(0.999_1.001)",
        ),
    ],
)
def test_the_plan_says_where_the_log_probs_come_from_and_how_they_are_corrected(overrides, source):
    assert line("log-prob", *overrides) == source


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ([], "vanilla on grpo advantages, token-mean"),
        ([f"{ACTOR}.loss_agg_mode=token-sum"], "vanilla on grpo advantages, token-sum"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "gspo on grpo advantages, seq-mean-token-mean"),
        (
            [f"{CORRECTION}.preset=bypass_pg_is", "algorithm.adv_estimator=rloo"],
            "bypass_mode (reinforce) on rloo advantages, token-mean",
        ),
        (
            ["algorithm.norm_adv_by_std_in_grpo=false"],
            "vanilla on grpo advantages that no deviation divides, token-mean",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a,b]",
                "algorithm.gdpo_reward_weights=[1,0.5]",
            ],
            "vanilla on gdpo advantages of a + 0.5 b, token-mean",
        ),
        (["algorithm.use_pf_ppo=true"], "vanilla on grpo advantages, token-mean, rows resampled by score (pow)"),
    ],
)
def test_the_plan_names_the_loss_and_the_aggregation_that_apply(overrides, loss):
    assert line("loss", *overrides) == loss


def test_the_plan_tells_of_dynamic_sampling_and_of_greedy_baselines_where_there_are_any():
    assert line("filter") is line("baseline") is None
    on = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
    assert line("filter", *on) == "groups whose acc varies, out of at most 10 batches of 8 prompts"
    endless = "algorithm.filter_groups.max_num_gen_batches=0"
    assert line("filter", *on, endless) == "groups whose acc varies, out of as many batches as it takes, of 8 prompts"
    overlong = ["reward.reward_kwargs.overlong_buffer_cfg.enable=true", "data.max_response_length=2048"]
    assert line("reward") is None
    assert line("reward", *overlong) == "less up to 1 over the last 512 of 2,048 tokens"
    assert line("baseline", "algorithm.adv_estimator=remax") == "8 greedy responses, one to each prompt"


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("trainer.seed=1", False),
        (f"{ACTOR}.ppo_mini_batch_size=4", True),
        (f"{ACTOR}.ppo_epochs=2", True),
        ("algorithm.use_kl_in_reward=true", True),
        (f"{ACTOR}.use_kl_loss=true", False),
        (f"{CORRECTION}.rollout_is=token", True),
        (f"{CORRECTION}.preset=decoupled_k3_rs", True),
        (f"{ACTOR}.calculate_sum_pi_squared=true", True),
        ("algorithm.adv_estimator=optimal_token_baseline", True),
    ],
)
def test_old_log_probs_are_computed_where_the_policy_moves_or_something_before_the_updates_reads_them(override, needs):
    assert needs_old_log_probs(load_config([*ONE_UPDATE, override])) is needs
    if override.startswith(f"{ACTOR}.calc") or "token_baseline" in override:
        return
    # The bypass mode takes the rollout's, whatever else is asked for.
    assert not needs_old_log_probs(load_config([*ONE_UPDATE, override, f"{CORRECTION}.bypass_mode=true"]))


def test_what_an_estimator_of_the_users_own_reads_is_left_open():
    overrides = [
        "algorithm.adv_estimator=my.own:estimator",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]
    assert (
        "unless your estimator takes old_log_probs"
        in batch_plan(load_config(overrides, train_rows_given=True), 1).log_prob
    )
