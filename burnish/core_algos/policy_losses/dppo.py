"""DPPO: a trust region on the probability of the sampled token instead of a clip of the ratio (arXiv:2602.04879)."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    clip_range,
    loss_inputs,
    ratio_bound,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)

# Log-probs are taken to be at most this: p stays below 1, and log(1 - p) above -18.5.
_MAX_LOG_PROB = -1e-8


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """DPPO with the total variation of the sampled token against the rest (arXiv:2602.04879).

    L = -A sg(min(rho, c)) log_prob sg(valid), p = exp(log_prob). valid: p - p_old <= high where A > 0, else
    p - p_old >= -low. Probabilities move by at most the clip's offsets, so a rare token may grow by a large factor where
    PPO's clip would stop it; its weight is at most c = ``clip_ratio_c`` (set 20).

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights: see
            `compute_policy_loss_vanilla`.

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens outside the trust region, which have no gradient),
            ``actor/dppo_truncated_frac`` (tokens with rho > c), ``actor/ppo_kl`` (mean of old_log_prob - log_prob,
            clamped).

    Raises:
        ConfigError: no config, or ``clip_ratio_c`` <= 1.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    low, high = clip_range(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    growth = _probability(log_prob.detach()) - _probability(old_log_prob)
    valid = torch.where(advantages > 0, growth <= high, growth >= -low)
    return _truncated_reinforce(
        old_log_prob, log_prob, advantages, mask, valid, loss_agg_mode, config, rollout_is_weights
    )


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """DPPO with the binary KL of the sampled token against the rest (arXiv:2602.04879).

    L = -A sg(min(rho, c)) log_prob sg(valid), p = exp(log_prob), K = p_old (old_log_prob - log_prob) + (1 - p_old)
    log((1 - p_old) / (1 - p)). valid: K <= high or p <= p_old where A > 0, else K <= low or p >= p_old: what leads back to
    the old policy is always valid. For p and p_old, log-probs are taken to be at most -1e-8, which keeps K finite.

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights: see
            `compute_policy_loss_vanilla`.

    Returns:
        loss: a scalar.
        metrics: those of `compute_policy_loss_dppo_tv`.

    Raises:
        ConfigError: no config, or ``clip_ratio_c`` <= 1.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    low, high = clip_range(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    divergence = _binary_kl(old_log_prob, log_prob.detach())
    falls, rises = log_prob.detach() <= old_log_prob, log_prob.detach() >= old_log_prob
    valid = torch.where(advantages > 0, (divergence <= high) | falls, (divergence <= low) | rises)
    return _truncated_reinforce(
        old_log_prob, log_prob, advantages, mask, valid, loss_agg_mode, config, rollout_is_weights
    )


def _truncated_reinforce(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    valid: Bool[Tensor, "batch response"],
    loss_agg_mode: str,
    config: PolicyLossSettings,
    rollout_is_weights: Float[Tensor, "batch response"] | None,
) -> LossAndMetrics:
    """-A sg(min(rho, c)) log_prob on the valid tokens, 0 on the others, which stay in the denominator."""
    bound = ratio_bound(config)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    losses = -advantages * ratio.clamp(max=bound) * log_prob * valid
    losses = weighted(losses, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, pg_clipfrac=~valid, dppo_truncated_frac=ratio > bound, ppo_kl=-log_ratio)
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


def _probability(log_prob: Float[Tensor, "batch response"]) -> Float[Tensor, "batch response"]:
    return log_prob.clamp(max=_MAX_LOG_PROB).exp()


def _binary_kl(
    old_log_prob: Float[Tensor, "batch response"], log_prob: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """KL between two policies that only tell the sampled token from the rest."""
    old_log_prob, log_prob = old_log_prob.clamp(max=_MAX_LOG_PROB), log_prob.clamp(max=_MAX_LOG_PROB)
    # By expm1, as 1 - exp(x) of an x near 0 has no correct digit in float32.
    old_rest, rest = -torch.expm1(old_log_prob), -torch.expm1(log_prob)
    return old_log_prob.exp() * (old_log_prob - log_prob) + old_rest * (old_rest.log() - rest.log())
