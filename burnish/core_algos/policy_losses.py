"""Policy losses: from log-probs and advantages to a loss whose gradient improves the policy.

Every loss has one signature, ``(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights=None) -> (loss, metrics)``. The mask it gets is the loss mask. Denominators are those of the whole
optimizer step (``config.global_batch_info``, see `burnish.core_algos.aggregation`); metrics are detached scalars that
the engine adds up over micro-batches and ranks.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import GlobalBatchInfo, agg_loss, token_mean
from burnish.utils.errors import ConfigError
from burnish.utils.registry import Registry
from burnish.utils.torch_functional import as_mask, zero_outside

LossAndMetrics = tuple[Float[Tensor, ""], dict[str, Tensor]]


@runtime_checkable
class PolicyLossSettings(Protocol):
    """What policy losses read of the section ``actor_rollout_ref.actor``."""

    @property
    def clip_ratio(self) -> float: ...

    @property
    def clip_ratio_low(self) -> float | None: ...

    @property
    def clip_ratio_high(self) -> float | None: ...

    @property
    def clip_ratio_c(self) -> float: ...

    @property
    def global_batch_info(self) -> GlobalBatchInfo: ...


POLICY_LOSSES: Registry[Callable[..., LossAndMetrics]] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
)


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a policy loss, a function of the signature above, under ``name``."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> Callable[..., LossAndMetrics]:
    """The policy loss called ``name``, or the one at ``package.module:attribute``.

    Raises:
        ConfigError: no such loss; lists the choices.
    """
    return POLICY_LOSSES.get(name)


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """PPO's clipped loss (arXiv:1707.06347) with a second clip for A < 0 (arXiv:1912.09729).

    rho = exp(clamp(log_prob - old_log_prob, +-20)); L = max(-A rho, -A clip(rho, 1 - low, 1 + high)); where A < 0 it is
    at most -A c. low and high are ``clip_ratio_low`` and ``clip_ratio_high``, or ``clip_ratio`` where they are null;
    c = ``clip_ratio_c``.

    Args:
        old_log_prob: of the policy that the update started from.
        log_prob: of the policy, with gradient.
        advantages: A.
        response_mask: the loss mask, bool or 0/1.
        loss_agg_mode: see `agg_loss`.
        config: the ``actor`` section.
        rollout_is_weights: importance weights of the rollout, multiplied into the loss per token.

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens where the first clip is active), ``actor/ppo_kl`` (mean of
            old_log_prob - log_prob, clamped), ``actor/pg_clipfrac_lower`` (tokens where the second one is).

    Raises:
        ConfigError: no config, or ``clip_ratio_c`` <= 1.
        TrainingError: shapes that differ, or a mask that is none.
    """
    config = _required(config)
    low, high = clip_range(config)
    mask = as_mask(response_mask, log_prob, "response_mask")
    old_log_prob, log_prob, advantages = zero_outside(
        mask, old_log_prob=old_log_prob.detach(), log_prob=log_prob, advantages=advantages.detach()
    )
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    ppo = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(ppo, bound), ppo)
    losses = weighted(losses, rollout_is_weights, mask)
    tokens = config.global_batch_info.get("batch_num_tokens")
    metrics = {
        "actor/pg_clipfrac": token_mean(clipped > unclipped, mask, tokens),
        "actor/ppo_kl": token_mean(-log_ratio, mask, tokens),
        "actor/pg_clipfrac_lower": token_mean((advantages < 0) & (ppo > bound), mask, tokens),
    }
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


compute_policy_loss = compute_policy_loss_vanilla
compute_policy_loss_clip = compute_policy_loss_vanilla


def clip_range(config: PolicyLossSettings) -> tuple[float, float]:
    """(low, high) offsets of the ratio's clip: ``clip_ratio_low/high``, or ``clip_ratio`` where they are null."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def clamped_log_ratio(
    log_prob: Float[Tensor, "batch response"], old_log_prob: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """log_prob - old_log_prob within +-20, so that its exp and the gradient stay finite."""
    return (log_prob - old_log_prob).clamp(-20.0, 20.0)


def weighted(
    losses: Float[Tensor, "batch response"],
    rollout_is_weights: Float[Tensor, "batch response"] | None,
    mask: Shaped[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """The loss per token times the rollout's importance weights, if there are any."""
    if rollout_is_weights is None:
        return losses
    (weights,) = zero_outside(mask, rollout_is_weights=rollout_is_weights.detach())
    return losses * weights


def _required(config: PolicyLossSettings | None) -> PolicyLossSettings:
    if config is None:
        raise ConfigError("A policy loss needs config, the actor_rollout_ref.actor section: it holds the clip ratios.")
    if config.clip_ratio_c <= 1.0:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={config.clip_ratio_c} must be above 1: it bounds a ratio."
        )
    return config
