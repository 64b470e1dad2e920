"""PPO's clipped loss."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    loss_inputs,
    ppo_terms,
    ratio_bound,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)


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
        TrainingError: shapes that differ, a mask that is none, or NaN or inf in a constant inside the mask.
    """
    config = required(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    unclipped, clipped = ppo_terms(log_ratio.exp(), advantages, config)
    ppo = torch.maximum(unclipped, clipped)
    bound = -advantages * ratio_bound(config)
    losses = torch.where(advantages < 0, torch.minimum(ppo, bound), ppo)
    losses = weighted(losses, rollout_is_weights, mask)
    metrics = token_metrics(
        mask,
        config,
        pg_clipfrac=clipped > unclipped,
        ppo_kl=-log_ratio,
        pg_clipfrac_lower=(advantages < 0) & (ppo > bound),
    )
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


compute_policy_loss = compute_policy_loss_vanilla
compute_policy_loss_clip = compute_policy_loss_vanilla
