"""Notices: combinations of keys that are allowed and deserve a thought."""

import re
from collections.abc import Iterator

from burnish.config import applied, names
from burnish.config.build import shown, value_of
from burnish.config.idle import idle_notices, wants_kl_in_reward
from burnish.config.idle_sections import without_size
from burnish.config.schema import leaves
from burnish.config.settings import Settings
from burnish.config.trainer import PPOTrainerConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD_MODEL = "reward.reward_model"


def advice(config: PPOTrainerConfig, settings: Settings) -> Iterator[str]:
    """One sentence for each such combination."""
    yield from sampling(config)
    yield from validation(config)
    yield from kl(config)
    yield from policy_loss(config)
    yield from rewards(config)
    yield from idle_notices(config)
    yield from micro_batches(config)
    yield from critic(config, settings)


def sampling(config: PPOTrainerConfig) -> Iterator[str]:
    """Sampling that makes the samples of a prompt equal, or the ratios biased."""
    yield from _stop_strings(config)
    if config.trainer.replay_rollouts is not None:
        return
    rollout = config.actor_rollout_ref.rollout
    is_greedy = not rollout.do_sample or rollout.temperature == 0
    bounds = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    truncates = {} if is_greedy else bounds
    changes = {"repetition_penalty": rollout.repetition_penalty != 1, "min_new_tokens": rollout.min_new_tokens > 0}
    biasing = [key for key, is_set in {**truncates, **changes}.items() if is_set]
    if biasing:
        keys = " and ".join(shown(config, f"{_ROLLOUT}.{key}") for key in biasing)
        kind, whole = ("changed", "unchanged") if any(changes.values()) else ("truncated", "whole")
        yield (
            f"{keys}: responses are sampled from a {kind} distribution, while log-probs are of the {whole} one; the ratios "
            f"are biased by that.{_uncorrected(config)}"
        )
    if is_greedy:
        key = f"{_ROLLOUT}.temperature" if rollout.do_sample else f"{_ROLLOUT}.do_sample"
        equal = f", so the {rollout.n} of one prompt are equal" if rollout.n > 1 else ""
        is_remax = config.algorithm.adv_estimator == "remax"
        nothing = ", and so is remax's baseline: every advantage is about 0" if is_remax else ""
        yield f"{shown(config, key)}: training responses are greedy{equal}{nothing}."


def _stop_strings(config: PPOTrainerConfig) -> Iterator[str]:
    """Stop strings with an escape that the command line leaves as it is."""
    for key in (f"{_ROLLOUT}.stop", f"{_ROLLOUT}.val_kwargs.stop"):
        if key in config.set_keys and any(re.search(r"\\[nrt]", text) for text in value_of(config, key) or ()):
            yield (
                f"{shown(config, key)} holds a backslash with a letter, taken as these two characters. If a line break or "
                f"a tab is meant, write it in a YAML file in double quotes."
            )


def _uncorrected(config: PPOTrainerConfig) -> str:
    """That a use of the rollout's log-probs does not see the bias, as they are of the model's own distribution too."""
    correction, section = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    uses = {
        "bypass_mode": correction.bypass_mode,
        "rollout_is": correction.rollout_is is not None,
        "rollout_rs": correction.rollout_rs is not None,
    }
    keys = " and ".join(shown(config, f"{section}.{name}") for name, is_used in uses.items() if is_used)
    return f" {keys} leaves that bias in: the rollout's log-probs are of the whole distribution too." if keys else ""


def validation(config: PPOTrainerConfig) -> Iterator[str]:
    """Validation settings that cancel each other."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if (not val.do_sample or val.temperature == 0) and val.n > 1:
        yield f"{shown(config, f'{_ROLLOUT}.val_kwargs.n')}: validation is greedy, so the {val.n} responses are equal."
    if not val.do_sample and val.temperature > 0:
        temperature = shown(config, f"{_ROLLOUT}.val_kwargs.temperature")
        yield f"{temperature} has no effect: val_kwargs.do_sample=false is greedy."


def kl(config: PPOTrainerConfig) -> Iterator[str]:
    """Where the KL to the reference goes, when that is unusual."""
    actor = config.actor_rollout_ref.actor
    if wants_kl_in_reward(config):
        yield (
            f"{shown(config, 'algorithm.kl_ctrl.kl_coef')} has no effect: {shown(config, 'algorithm.use_kl_in_reward')}. A "
            f"script for verl before 0.4 means the KL in the reward by it: set algorithm.use_kl_in_reward=true."
        )
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield (
            f"{shown(config, 'algorithm.use_kl_in_reward')} and {shown(config, f'{_ACTOR}.use_kl_loss')}: the KL "
            f"to the reference counts twice, in the reward and in the loss."
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"{shown(config, f'{_ACTOR}.kl_loss_type')}: as a loss this estimator has a gradient that is zero on "
            f"average, so it holds nothing back. k1+ has the same value and the right gradient."
        )


def policy_loss(config: PPOTrainerConfig) -> Iterator[str]:
    """Keys of the loss that do less than their names say, or that a loss wants otherwise."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss, estimator = applied.policy_loss(config), config.algorithm.adv_estimator
    if f"{_ACTOR}.loss_agg_mode" in config.set_keys and actor.loss_agg_mode != applied.loss_agg_mode(config):
        yield (
            f"{shown(config, f'{_ACTOR}.loss_agg_mode')}: the policy loss of {loss} weighs every sequence alike "
            f"(seq-mean-token-mean), whatever this key says; it counts for the entropy and the KL in the loss."
        )
    if loss in ("dppo_tv", "dppo_kl") and f"{_ACTOR}.clip_ratio_c" not in config.set_keys:
        yield (
            f"{shown(config, f'{_ACTOR}.clip_ratio_c')}: {loss} truncates the ratio there, and 3 is PPO's dual clip. "
            f"Its authors bound the ratio by 20: {_ACTOR}.clip_ratio_c=20."
        )
    if loss == "gspo" and max(actor.clip_ratio_low, actor.clip_ratio_high) >= 0.05:
        yield (
            f"{shown(config, f'{_ACTOR}.clip_ratio_high')}: gspo clips the mean ratio of a whole response, which hardly "
            f"ever moves that far, so nothing is clipped. Its authors took clip_ratio_low=0.0003 clip_ratio_high=0.0004."
        )
    several = actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.data.train_batch_size
    if loss == "gpg" and several:
        yield (
            f"{shown(config, f'{_ACTOR}.policy_loss.loss_mode')} has no ratio and no clip, but a batch is used for several "
            f"updates (ppo_mini_batch_size, ppo_epochs): nothing holds the later ones near the policy that sampled it."
        )
    if applied.clip_loss(config) == "vanilla" and correction.bypass_mode and correction.rollout_is is not None:
        yield (
            f"{shown(config, 'algorithm.rollout_correction.rollout_is')}: the weights are measured, not applied: the "
            f"ratio of ppo_clip is to the rollout's policy already."
        )
    # An estimator of the user's own may read it.
    reads_it = ":" in estimator or estimator in names.TOKEN_BASELINE_ADV_ESTIMATORS
    if actor.calculate_sum_pi_squared and not reads_it:
        yield (
            f"{shown(config, f'{_ACTOR}.calculate_sum_pi_squared')}: it costs a pass over the batch, but "
            f"algorithm.adv_estimator={estimator} does not read it."
        )


def rewards(config: PPOTrainerConfig) -> Iterator[str]:
    """A length limit that is not the one of the responses."""
    kwargs = config.reward.reward_kwargs
    if kwargs.overlong_buffer_cfg.enable and kwargs.max_resp_len != config.data.max_response_length:
        yield (
            f"{shown(config, 'reward.reward_kwargs.max_resp_len')} is not {shown(config, 'data.max_response_length')}: "
            f"the punishment of long responses counts from another length than the one where they are cut."
        )


def micro_batches(config: PPOTrainerConfig) -> Iterator[str]:
    """Micro-batch sizes that were set beside the switch that ignores them, and switches that were set off without a size."""
    update = ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu")
    log_prob = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu")
    for section, (switch, size) in (
        (_ACTOR, update),
        (_ROLLOUT, log_prob),
        ("actor_rollout_ref.ref", log_prob),
        ("critic", update),
        ("critic", ("use_dynamic_bsz", "forward_micro_batch_size_per_gpu")),
        (_REWARD_MODEL, ("use_dynamic_bsz", "micro_batch_size_per_gpu")),
    ):
        if section == _REWARD_MODEL and not config.reward.reward_model.enable:
            continue
        if leaves()[f"{section}.{size}"].follows is None:
            yield from without_size(config, f"{section}.{switch}", f"{section}.{size}")
        is_set = f"{section}.{size}" in config.set_keys and value_of(config, f"{section}.{size}") is not None
        if is_set and value_of(config, f"{section}.{switch}"):
            yield (
                f"{shown(config, f'{section}.{size}')} has no effect: with {section}.{switch}=true micro-batches are "
                f"cut by tokens."
            )


def critic(config: PPOTrainerConfig, settings: Settings) -> Iterator[str]:
    """A critic that nothing reads, or keys of one that does not exist."""
    estimator = config.algorithm.adv_estimator
    if config.critic.enable:
        if estimator != "gae" and ":" not in estimator:
            yield (
                f"{shown(config, 'critic.enable')}: a critic is trained, but algorithm.adv_estimator={estimator} does not "
                f"read its values."
            )
        return
    if config.trainer.critic_warmup > 0:
        yield f"{shown(config, 'trainer.critic_warmup')} has no effect: there is no critic."
    typed = [setting.shown for key, setting in settings.by_key.items() if _is_critic_key(key) and not setting.source]
    if typed:
        yield (f"No effect here: {', '.join(typed)}. The reason: algorithm.adv_estimator={estimator} trains no critic.")


def _is_critic_key(key: str) -> bool:
    return key.startswith("critic.") and key != "critic.enable"
