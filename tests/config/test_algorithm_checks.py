"""Estimator, loss, rollout correction, dynamic sampling and reward shaping: what contradicts is an error, what is odd is told."""

import re

import pytest

from burnish.config import load_config, load_with_notices, names
from burnish.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
FILTER = "algorithm.filter_groups"


def estimator(name: str, *more: str, n: int = 4) -> list[str]:
    return [f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n={n}", *more]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (estimator("grpo_passk", n=1), r"rollout\.n=1: .*the second best.*Set actor_rollout_ref\.rollout\.n=2"),
        (estimator("grpo_passk", "algorithm.allow_single_sample_groups=true", n=1), "whatever allow_single"),
        (estimator("optimal_token_baseline", n=1), r"rollout\.n=1: .*Set actor_rollout_ref\.rollout\.n=2"),
        (estimator("gdpo"), r"gdpo_reward_keys=null \(the default\).*Set algorithm\.gdpo_reward_keys=\[score\]"),
        (estimator("gdpo", "algorithm.gdpo_reward_keys=[]"), r"^algorithm\.gdpo_reward_keys=\[\]: .*=\[score\]"),
        (estimator("gdpo", "algorithm.gdpo_reward_keys=[a,b,a]"), r"twice.*gdpo_reward_keys=\[a,b\]\.$"),
        (
            estimator("gdpo", "algorithm.gdpo_reward_keys=[a,b,c]", "algorithm.gdpo_reward_weights=[2]"),
            r"^algorithm\.gdpo_reward_weights=\[2\] and .*3 keys.*gdpo_reward_weights=\[2\.0,1\.0,1\.0\]",
        ),
        (
            estimator("gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[0,0]"),
            r"^algorithm\.gdpo_reward_weights=\[0,0\]: .*Leave the key out",
        ),
        (
            estimator("grpo", f"{FILTER}.enable=true", f"{FILTER}.metric=acc", f"{ROLLOUT}.temperature=0"),
            r"filter_groups\.enable=true and .*temperature=0: greedy.*no group would be kept.*temperature=1\.$",
        ),
        (
            estimator("grpo", f"{FILTER}.enable=true", f"{FILTER}.metric=acc", f"{ROLLOUT}.do_sample=false"),
            r"do_sample=false: greedy",
        ),
        ([f"{CORRECTION}.rollout_rs=geometric"], r"'geometric' is no rule\. Did you mean seq_mean_k1\?"),
        ([f"{CORRECTION}.rollout_rs='[token_k1,seq_mean_k3]'"], "without brackets"),
        (
            estimator("gdpo", "algorithm.gdpo_reward_keys=[score]", "algorithm.use_kl_in_reward=true"),
            r"^algorithm\.use_kl_in_reward=true and .*use_kl_loss=true for a KL\.$",
        ),
        (
            estimator("tir_optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=false"),
            r"calculate_sum_pi_squared=false: .*Leave the key out",
        ),
        (
            estimator("optimal_token_baseline", f"{CORRECTION}.bypass_mode=true"),
            r"^algorithm\.adv_estimator=optimal_token_baseline and .*bypass_mode=true: .*bypass_mode=false\.$",
        ),
        (
            estimator("grpo", f"{ACTOR}.calculate_sum_pi_squared=true", f"{CORRECTION}.bypass_mode=true"),
            r"^actor_rollout_ref\.actor\.calculate_sum_pi_squared=true and .*bypass_mode=false\.$",
        ),
        (
            [f"{LOSS}=gspo", f"{CORRECTION}.bypass_mode=true"],
            r"loss_mode=gspo and .*bypass_mode=true: .*loss_type chooses \(ppo_clip, reinforce\)",
        ),
        (
            [f"{LOSS}=my.losses:own", f"{CORRECTION}.preset=bypass_pg_is"],
            r"bypass_mode=true \(from algorithm\.rollout_correction\.preset=bypass_pg_is\)",
        ),
        ([f"{LOSS}=bypass_mode"], r"which is off\. Set algorithm\.rollout_correction\.bypass_mode=true.*=vanilla"),
        ([f"{CORRECTION}.rollout_rs=token_k9"], "token_k9"),
        ([f"{CORRECTION}.rollout_rs=token_k1"], "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=abc"], "abc"),
        ([f"{CORRECTION}.rollout_is=tokens"], "Did you mean token"),
        ([f"{CORRECTION}.preset=decoupled_tokn_is"], "Did you mean decoupled_token_is"),
        (
            [f"{LOSS}=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=5"],
            r"clip_cov_lb=5 and .*clip_cov_ub=5\.0 \(the default\): .*1 and 5 are usual",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2"],
            "look like bounds",
        ),
        (estimator("grpo", f"{FILTER}.enable=true"), r"filter_groups\.enable=true needs .*acc, score, seq_reward or any"),
        (estimator("grpo", f"{FILTER}.enable=true", f"{FILTER}.metric=null"), "Set algorithm.filter_groups.metric=acc"),
        (
            estimator("remax", f"{FILTER}.enable=true", f"{FILTER}.metric=acc", n=1),
            r"filter_groups\.enable=true and .*rollout\.n=1: .*Set actor_rollout_ref\.rollout\.n=2",
        ),
        (
            estimator(
                "grpo", f"{FILTER}.enable=1", f"{FILTER}.metric=a", "algorithm.allow_single_sample_groups=true", n=1
            ),
            "no group would be kept",
        ),
        (
            [f"{OVERLONG}.enable=true", "data.max_response_length=256"],
            r"len=512 \(the default\) is more than .*max_resp_len=256 \(from data\.max_response_length=256\).*len=256\.$",
        ),
        (["reward.reward_kwargs.max_resp_length=9"], r"Did you mean reward\.reward_kwargs\.max_resp_len\?"),
        (["reward_model.reward_kwargs.alpha=9"], r"your own reward manager go below reward\.reward_kwargs\.custom"),
    ],
)  # fmt: skip
def test_a_contradiction_is_an_error_that_says_the_way_out(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        estimator("remax", n=1),
        estimator("rloo", "algorithm.allow_single_sample_groups=true", n=1),
        estimator("gdpo", "algorithm.gdpo_reward_keys=[score,acc]", "algorithm.gdpo_reward_weights=[1,0.5]"),
        estimator("optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=true"),
        estimator("gae", f"{FILTER}.enable=true", f"{FILTER}.metric=seq_reward"),
        [f"{LOSS}=vanilla", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"],
        [f"{LOSS}=bypass_mode", f"{CORRECTION}.bypass_mode=true"],
        [f"{LOSS}=cispo", f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2"],
        [f"{CORRECTION}.rollout_rs=token_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold=0.5_2,0.3"],
        [f"{OVERLONG}.enable=true", "data.max_response_length=512"],
        ["reward.reward_manager.name=my:Manager", "reward.reward_kwargs.custom.alpha=9"],
    ],
)
def test_a_combination_that_works_is_accepted_without_a_notice(overrides):
    assert load_with_notices(overrides).notices == ()


def test_a_threshold_with_an_underscore_is_no_number_with_one():
    config = load_config([f"{CORRECTION}.rollout_rs=seq_sum_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2"])
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.5_2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LOSS}=sapo", f"{ACTOR}.loss_agg_mode=token-sum"], "loss_agg_mode=token-sum: the policy loss of sapo weighs"),
        (
            [f"{LOSS}=geo_mean", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
            "counts for the entropy and the KL in the loss",
        ),
        ([f"{LOSS}=dppo_tv"], r"clip_ratio_c=3\.0 \(the default\): .*clip_ratio_c=20"),
        ([f"{LOSS}=dppo_kl"], r"clip_ratio_c=20"),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            "rollout_is=token: the weights are measured, not applied",
        ),
        (estimator("grpo", f"{ACTOR}.calculate_sum_pi_squared=true"), "adv_estimator=grpo does not read it"),
        (
            [f"{OVERLONG}.enable=true", "reward.reward_kwargs.max_resp_len=600"],
            r"max_resp_len=600 is not data\.max_response_length=512",
        ),
        ([f"{ROLLOUT}.top_p=0.9"], r"ratios are biased by that\.$"),
        (
            [f"{ROLLOUT}.top_p=0.9", f"{CORRECTION}.bypass_mode=true"],
            r"bypass_mode=true leaves that bias in: the rollout's log-probs are of the whole distribution too",
        ),
        (
            [f"{ROLLOUT}.top_k=9", f"{CORRECTION}.preset=decoupled_geo_rs_seq_tis"],
            r"rollout_is=sequence \(from .*preset=decoupled_geo_rs_seq_tis\) and .*rollout_rs=seq_mean_k1 .*leaves that bias",
        ),
        ([f"{LOSS}=gspo"], r"clip_ratio_high=0\.2 .*clip_ratio_low=0\.0003 clip_ratio_high=0\.0004"),
        (estimator("grpo", "critic.enable=true"), r"critic\.enable=true: .*adv_estimator=grpo does not read its values"),
        (
            estimator("remax", f"{ROLLOUT}.do_sample=false", n=1),
            "greedy, and so is remax's baseline: every advantage is about 0",
        ),
        ([f"{LOSS}=gpg"], r"loss_mode=gpg has no ratio and no clip.*several updates"),
    ],
)  # fmt: skip
def test_an_odd_combination_is_told(overrides, message):
    (notice,) = load_with_notices(overrides).notices
    assert re.search(message, notice), notice


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{LOSS}=sapo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [f"{LOSS}=geo_mean"],
        [f"{LOSS}=gspo", f"{ACTOR}.clip_ratio_low=0.0003", f"{ACTOR}.clip_ratio_high=0.0004"],
        [f"{LOSS}=dppo_kl", f"{ACTOR}.clip_ratio_c=3"],
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.loss_type=reinforce"],
        estimator("my.own:estimator", f"{ACTOR}.calculate_sum_pi_squared=true", "critic.enable=true"),
    ],
)
def test_the_same_keys_beside_others_are_nothing_to_tell(overrides):
    assert load_with_notices(overrides).notices == ()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{ACTOR}.policy_loss.clip_cov_ratio=0.1"], "the policy loss in use is vanilla"),
        ([f"{LOSS}=dro", f"{ACTOR}.clip_ratio_high=0.3"], "the policy loss in use is dro"),
        ([f"{LOSS}=cispo", f"{ACTOR}.clip_ratio_c=10"], "the policy loss in use is cispo"),
        ([f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.tau_pos=2"], "the policy loss in use is vanilla"),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.clip_ratio=0.3"],
            "the policy loss in use is reinforce",
        ),
        (estimator("rloo", "algorithm.norm_adv_by_std_in_grpo=false"), "the advantage estimator in use is rloo"),
        (estimator("grpo", "algorithm.lam=0.9"), "the advantage estimator in use is grpo"),
        (estimator("grpo", "algorithm.gdpo_reward_keys=[acc]"), "the advantage estimator in use is grpo"),
        (["algorithm.pf_ppo.weight_pow=3"], r"algorithm\.use_pf_ppo=false \(the default\)"),
        ([f"{FILTER}.metric=acc", f"{FILTER}.enable=false"], r"algorithm\.filter_groups\.enable=false"),
        ([f"{CORRECTION}.rollout_is_threshold=5"], r"rollout_is=null"),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], r"rollout_is=null"),
        ([f"{CORRECTION}.rollout_rs_threshold=5"], r"rollout_rs=null"),
        ([f"{CORRECTION}.loss_type=reinforce"], r"bypass_mode=false"),
        ([f"{OVERLONG}.len=64"], r"enable=false"),
        ([f"{ACTOR}.kl_loss_coef=0.01"], r"use_kl_loss=false"),
        (["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=false"], r"algorithm\.use_kl_in_reward=false"),
        ([f"{ACTOR}.loss_scale_factor=64"], "only loss_agg_mode=seq-mean-token-sum-norm"),
    ],
)
def test_a_key_that_another_choice_leaves_idle_is_told_with_the_reason(overrides, reason):
    (notice,) = load_with_notices(overrides).notices
    typed = next(override for override in overrides if override in notice)
    assert re.search(rf"^No effect here: {re.escape(typed)}\. The reason: .*{reason}", notice), notice


def test_idle_keys_of_one_reason_share_a_sentence():
    overrides = [f"{OVERLONG}.len=64", f"{OVERLONG}.log=true", f"{OVERLONG}.enable=false"]
    (notice,) = load_with_notices(overrides).notices
    assert overrides[0] in notice
    assert overrides[1] in notice


@pytest.mark.parametrize(
    "overrides",
    [
        # What repeats the default changes nothing.
        estimator("grpo", "algorithm.lam=1.0", f"{CORRECTION}.loss_type=ppo_clip", f"{ACTOR}.tau_pos=1.0"),
        # No KL, said twice.
        [f"{ACTOR}.kl_loss_coef=0.0", f"{ACTOR}.use_kl_loss=false", "algorithm.kl_ctrl.kl_coef=0.0"],
        # Users' own parts may read any key.
        [f"{LOSS}=my.losses:own", f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.dro_beta=1"],
        estimator("my.own:estimator", "algorithm.lam=0.9"),
        ["reward.reward_manager.name=my:Manager", f"{OVERLONG}.len=64"],
        # A recipe of burnish's that another choice overrules.
        ["recipe=dapo", f"{FILTER}.enable=false", f"{OVERLONG}.enable=false", f"{LOSS}=cispo"],
    ],
)
def test_a_key_that_may_be_read_or_changes_nothing_is_not_called_idle(overrides):
    assert load_with_notices(overrides).notices == ()


def test_a_token_baseline_switches_its_statistic_on_and_no_other_estimator_does():
    on = {
        name
        for name in names.ADV_ESTIMATORS
        if load_config(estimator(name, "algorithm.gdpo_reward_keys=[score]")).actor_rollout_ref.actor.calculate_sum_pi_squared
    }  # fmt: skip
    assert on == set(names.TOKEN_BASELINE_ADV_ESTIMATORS)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_the_bypass_mode_brings_its_loss_which_sees_the_correction(loss_type):
    config = load_config([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type={loss_type}"])
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert policy_loss.loss_mode == "bypass_mode"
    assert policy_loss.rollout_correction is config.algorithm.rollout_correction
    assert policy_loss.rollout_correction.loss_type == loss_type


@pytest.mark.parametrize("preset", names.ROLLOUT_CORRECTION_PRESETS)
def test_every_preset_loads_and_says_what_its_name_says(preset):
    loaded = load_with_notices([f"{CORRECTION}.preset={preset}"])
    correction = loaded.config.algorithm.rollout_correction
    assert loaded.notices == ()
    assert correction.bypass_mode == preset.startswith("bypass")
    assert (correction.rollout_rs is not None) == ("_rs" in preset)
    assert (correction.rollout_is is not None) == ("_is" in preset.replace("tis", "is").replace("icepop", "is"))
    assert (correction.loss_type == "reinforce") == preset.startswith("bypass_pg")


def test_what_is_set_beside_a_preset_counts_more():
    preset = f"{CORRECTION}.preset=decoupled_geo_rs_token_tis"
    plain = load_config([preset]).algorithm.rollout_correction
    assert (plain.rollout_is, plain.rollout_rs, plain.rollout_rs_threshold) == ("token", "seq_mean_k1", "0.999_1.001")
    without = load_config([preset, f"{CORRECTION}.rollout_is=null"]).algorithm.rollout_correction
    assert (without.rollout_is, without.rollout_rs) == (None, "seq_mean_k1")
    bounds = load_config([preset, f"{CORRECTION}.rollout_rs_threshold=0.9_1.1"]).algorithm.rollout_correction
    assert (bounds.rollout_rs, bounds.rollout_rs_threshold) == ("seq_mean_k1", "0.9_1.1")


def test_bounds_of_a_preset_go_with_its_rules():
    preset = f"{CORRECTION}.preset=decoupled_geo_rs"
    with pytest.raises(
        ConfigError, match=r"rollout_rs=token_k3 needs algorithm\.rollout_correction\.rollout_rs_threshold"
    ):
        load_config([preset, f"{CORRECTION}.rollout_rs=token_k3"])


def test_a_file_that_lists_every_default_does_not_undo_a_preset_of_the_command_line(tmp_path):
    (tmp_path / "all.yaml").write_text("algorithm: {rollout_correction: {rollout_is: null, bypass_mode: false}}\n")
    preset = f"{CORRECTION}.preset=bypass_pg_is"
    correction = load_config([preset], "all", str(tmp_path)).algorithm.rollout_correction
    assert (correction.rollout_is, correction.bypass_mode) == ("sequence", True)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{CORRECTION}.preset=bypass_pg_geo_rs_token_tis"],
        [f"{CORRECTION}.preset=decoupled_seq_is_rs", f"{CORRECTION}.rollout_is=null"],
        [f"{CORRECTION}.preset=decoupled_k3_rs"],
        estimator("optimal_token_baseline"),
        [f"{LOSS}=gpg", "algorithm.filter_groups.metric=acc"],
    ],
)
def test_what_was_settled_is_saved_and_loads_as_the_same(tmp_path, overrides):
    from burnish.config import to_yaml

    config = load_config(overrides)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config([], "config", str(tmp_path)) == config
