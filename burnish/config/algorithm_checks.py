"""Checks across the keys of an algorithm: estimator, loss, rollout correction, dynamic sampling, reward shaping.

They come before `burnish.config.settle`, so every key has the value that the user gave it. Each raises a `ConfigError`
that names the keys as typed, the rule and the nearest legal value.
"""

from burnish.config import names
from burnish.config.applied import clip_loss
from burnish.config.build import shown
from burnish.config.rejection import parse_rejection, weight_bounds
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import show
from burnish.utils.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_SUM_PI_SQUARED = f"{_ACTOR}.calculate_sum_pi_squared"
_ROLLOUT = "actor_rollout_ref.rollout"
_N = f"{_ROLLOUT}.n"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_algorithm(config: PPOTrainerConfig) -> None:
    """Runs every check of this file.

    Raises:
        ConfigError: keys contradict each other.
    """
    check_estimator(config)
    check_gdpo(config)
    check_token_baseline(config)
    check_bypass_mode(config)
    check_rejection(config)
    check_policy_loss(config)
    check_filter_groups(config)
    check_overlong_buffer(config)


def check_estimator(config: PPOTrainerConfig) -> None:
    """The estimator has what it compares: a critic, or several samples of a prompt."""
    estimator = config.algorithm.adv_estimator
    if estimator == "gae" and config.critic.enable is False:
        raise ConfigError(
            f"{shown(config, 'critic.enable')}: {shown(config, 'algorithm.adv_estimator')} needs a critic. Leave the "
            f"first out, or take an estimator without a critic, as algorithm.adv_estimator=grpo."
        )
    if estimator not in names.GROUP_ADV_ESTIMATORS or config.actor_rollout_ref.rollout.n > 1:
        return
    if estimator == "grpo_passk":
        raise ConfigError(
            f"{shown(config, _N)}: algorithm.adv_estimator=grpo_passk compares the best sample of a prompt with the "
            f"second best, so there must be at least 2, whatever allow_single_sample_groups says. Set {_N}=2 or more "
            f"(8 is usual)."
        )
    if not config.algorithm.allow_single_sample_groups:
        raise ConfigError(
            f"{shown(config, _N)}: algorithm.adv_estimator={estimator} compares the samples of a prompt, so there must "
            f"be at least 2. Set {_N}=2 or more (8 is usual), or accept a baseline of 0 by "
            f"algorithm.allow_single_sample_groups=true."
        )


def check_gdpo(config: PPOTrainerConfig) -> None:
    """GDPO knows its components and as many weights, and nothing else is in its rewards."""
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        raise ConfigError(
            f"{shown(config, 'algorithm.gdpo_reward_keys')}: algorithm.adv_estimator=gdpo needs the names of the "
            f"numbers that it normalises one by one: what the reward function returns, or score for the score itself. "
            f"Set algorithm.gdpo_reward_keys=[score], or more of them."
        )
    unique = list(dict.fromkeys(keys))
    if len(unique) < len(keys):
        raise ConfigError(
            f"{shown(config, 'algorithm.gdpo_reward_keys')} names one component twice, whose weight "
            f"algorithm.gdpo_reward_weights would raise instead. Set algorithm.gdpo_reward_keys={show(unique)}."
        )
    if weights is not None and len(weights) != len(keys):
        nearest = [*weights, *[1.0] * len(keys)][: len(keys)]
        raise ConfigError(
            f"{shown(config, 'algorithm.gdpo_reward_weights')} and {shown(config, 'algorithm.gdpo_reward_keys')}: "
            f"there must be one weight for each of the {len(keys)} keys. The nearest value is "
            f"algorithm.gdpo_reward_weights={show(nearest)}."
        )
    if weights is not None and not any(weights):
        raise ConfigError(
            f"{shown(config, 'algorithm.gdpo_reward_weights')}: without a weight there is nothing to learn. Leave the key "
            f"out for a weight of 1 each."
        )
    if algorithm.use_kl_in_reward:
        raise ConfigError(
            f"{shown(config, 'algorithm.use_kl_in_reward')} and {shown(config, 'algorithm.adv_estimator')}: GDPO's "
            f"advantages come from the components that the reward function returns, so a KL in the reward would reach "
            f"none of them. Set algorithm.use_kl_in_reward=false, and {_ACTOR}.use_kl_loss=true for a KL."
        )


def check_token_baseline(config: PPOTrainerConfig) -> None:
    """The sum of squared probabilities comes with the old log-probs, and the token baselines read it."""
    estimator, correction = config.algorithm.adv_estimator, config.algorithm.rollout_correction
    needs_it = estimator in names.TOKEN_BASELINE_ADV_ESTIMATORS
    if needs_it and _SUM_PI_SQUARED in config.set_keys and not config.actor_rollout_ref.actor.calculate_sum_pi_squared:
        raise ConfigError(
            f"{shown(config, _SUM_PI_SQUARED)}: algorithm.adv_estimator={estimator} reads it. Leave the key out."
        )
    if correction.bypass_mode and (needs_it or config.actor_rollout_ref.actor.calculate_sum_pi_squared):
        reader = shown(config, "algorithm.adv_estimator" if needs_it else _SUM_PI_SQUARED)
        raise ConfigError(
            f"{reader} and {shown(config, _BYPASS)}: the sum of squared probabilities is computed in the trainer's "
            f"pass for the old log-probs, which the bypass mode leaves out. Set {_BYPASS}=false."
        )


def check_bypass_mode(config: PPOTrainerConfig) -> None:
    """The bypass mode and its loss come together."""
    bypass, loss = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and loss not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"{shown(config, _LOSS_MODE)} and {shown(config, _BYPASS)}: the bypass mode has its own loss, which "
            f"algorithm.rollout_correction.loss_type chooses (ppo_clip, reinforce). Leave the first out, or set "
            f"{_BYPASS}=false."
        )
    if loss == "bypass_mode" and not bypass:
        raise ConfigError(
            f"{shown(config, _LOSS_MODE)}: this is the loss of the bypass mode, which is off. Set {_BYPASS}=true, "
            f"which brings the loss with it, or {_LOSS_MODE}=vanilla."
        )


def check_rejection(config: PPOTrainerConfig) -> None:
    """The rules of rejection can be read, and there are bounds for each; so can the bounds of importance weights."""
    correction = config.algorithm.rollout_correction
    parse_rejection(correction.rollout_rs, correction.rollout_rs_threshold)
    weight_bounds(correction.rollout_is_threshold)


def check_policy_loss(config: PPOTrainerConfig) -> None:
    """Ranges of the loss are ranges, and offsets are offsets."""
    actor, loss = config.actor_rollout_ref.actor, clip_loss(config)
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    # 0.8 and 1.2 are bounds, and were probably copied from a guide.
    looks_like_bounds = low < 1 < high and high - low < 1
    if looks_like_bounds and loss == "vanilla" and not actor.allow_wide_clip:
        raise ConfigError(
            f"{shown(config, f'{_ACTOR}.clip_ratio_low')} and {shown(config, f'{_ACTOR}.clip_ratio_high')} look like "
            f"bounds of the ratio, but these keys are offsets from 1. Probably meant: clip_ratio_low={1 - low:.6g} "
            f"clip_ratio_high={high - 1:.6g}. To clip to [{1 - low:.6g}, {1 + high:.6g}] all the same, set "
            f"{_ACTOR}.allow_wide_clip=true."
        )
    lower, upper = (f"{_ACTOR}.policy_loss.clip_cov_{name}" for name in ("lb", "ub"))
    if loss == "clip_cov" and actor.policy_loss.clip_cov_lb >= actor.policy_loss.clip_cov_ub:
        raise ConfigError(
            f"{shown(config, lower)} and {shown(config, upper)}: no covariance lies between them, so no token could be "
            f"left out. The lower bound must be below the upper one; 1 and 5 are usual."
        )


def check_filter_groups(config: PPOTrainerConfig) -> None:
    """Dynamic sampling knows what must vary, and there is something that can vary."""
    filter_groups, rollout = config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    if not filter_groups.enable:
        return
    enable = shown(config, "algorithm.filter_groups.enable")
    if not filter_groups.metric:
        raise ConfigError(
            f"{enable} needs algorithm.filter_groups.metric, which says what must vary within a group: acc, score, "
            f"seq_reward or any number that the reward function returns. Set algorithm.filter_groups.metric=acc, "
            f"which reward.reward_manager.name=dapo always reports."
        )
    if rollout.n == 1:
        raise ConfigError(
            f"{enable} and {shown(config, _N)}: within a group of one response nothing varies, so no group would be "
            f"kept. Set {_N}=2 or more (16 is usual)."
        )
    for key, is_greedy in (("do_sample", not rollout.do_sample), ("temperature", rollout.temperature == 0)):
        if is_greedy:
            raise ConfigError(
                f"{enable} and {shown(config, f'{_ROLLOUT}.{key}')}: greedy responses to one prompt are equal, so within "
                f"a group nothing varies and no group would be kept. Set {_ROLLOUT}.do_sample=true and "
                f"{_ROLLOUT}.temperature=1."
            )


def check_overlong_buffer(config: PPOTrainerConfig) -> None:
    """The punishment of long responses begins before the limit that it counts from."""
    kwargs = config.reward.reward_kwargs
    buffer, section = kwargs.overlong_buffer_cfg, "reward.reward_kwargs"
    if buffer.enable and buffer.len > kwargs.max_resp_len:
        raise ConfigError(
            f"{shown(config, f'{section}.overlong_buffer_cfg.len')} is more than "
            f"{shown(config, f'{section}.max_resp_len')}: the buffer is the last part of the longest response, a fifth "
            f"of it as a rule. The nearest value is {section}.overlong_buffer_cfg.len={kwargs.max_resp_len}."
        )
