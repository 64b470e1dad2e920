"""Notices: combinations of keys that are allowed and deserve a thought."""

from collections.abc import Iterator

from burnish.config.build import shown, value_of
from burnish.config.settings import Settings
from burnish.config.trainer import PPOTrainerConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def advice(config: PPOTrainerConfig, settings: Settings) -> Iterator[str]:
    """One sentence for each such combination."""
    yield from sampling(config)
    yield from validation(config)
    yield from kl(config)
    yield from micro_batches(config)
    yield from critic(config, settings)


def sampling(config: PPOTrainerConfig) -> Iterator[str]:
    """Sampling that makes the samples of a prompt equal, or the ratios biased."""
    rollout = config.actor_rollout_ref.rollout
    truncated = [key for key, is_so in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if is_so]
    if truncated:
        keys = " and ".join(shown(config, f"{_ROLLOUT}.{key}") for key in truncated)
        yield (
            f"{keys}: responses are sampled from a truncated distribution, while log-probs are of the whole one; the "
            f"ratios are biased by that."
        )
    if not rollout.do_sample or rollout.temperature == 0:
        key = f"{_ROLLOUT}.temperature" if rollout.do_sample else f"{_ROLLOUT}.do_sample"
        equal = f", so the {rollout.n} of one prompt are equal" if rollout.n > 1 else ""
        yield f"{shown(config, key)}: training responses are greedy{equal}."


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


def micro_batches(config: PPOTrainerConfig) -> Iterator[str]:
    """Micro-batch sizes that were set beside the switch that ignores them."""
    update = ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu")
    log_prob = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu")
    for section, (switch, size) in (
        (_ACTOR, update),
        (_ROLLOUT, log_prob),
        ("actor_rollout_ref.ref", log_prob),
        ("critic", update),
    ):
        is_set = f"{section}.{size}" in config.set_keys and value_of(config, f"{section}.{size}") is not None
        if is_set and value_of(config, f"{section}.{switch}"):
            yield (
                f"{shown(config, f'{section}.{size}')} has no effect: with {section}.{switch}=true micro-batches are "
                f"cut by tokens."
            )


def critic(config: PPOTrainerConfig, settings: Settings) -> Iterator[str]:
    """Keys of a critic that does not exist."""
    if config.critic.enable:
        return
    if config.trainer.critic_warmup > 0:
        yield f"{shown(config, 'trainer.critic_warmup')} has no effect: there is no critic."
    typed = [setting.shown for key, setting in settings.by_key.items() if _is_critic_key(key) and not setting.source]
    if typed:
        yield (
            f"No effect here: {', '.join(typed)}. The reason: algorithm.adv_estimator={config.algorithm.adv_estimator} "
            f"trains no critic."
        )


def _is_critic_key(key: str) -> bool:
    return key.startswith("critic.") and key != "critic.enable"
