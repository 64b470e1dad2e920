"""Losses that take a response as one action, or weigh every response alike: GSPO, SAPO and GMPO.

They are means over responses by definition, so ``loss_agg_mode`` has no effect on them.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    clip_range,
    loss_inputs,
    ppo_terms,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)
from burnish.utils.torch_functional import at_least_fp32, check_finite, masked_mean


@runtime_checkable
class SapoSettings(PolicyLossSettings, Protocol):
    """What `compute_policy_loss_sapo` reads."""

    @property
    def tau_pos(self) -> float: ...

    @property
    def tau_neg(self) -> float: ...


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "seq-mean-token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """GSPO (arXiv:2507.18071): PPO's clip of the ratio of whole responses, s_i = mean_t(log_prob - old_log_prob).

    Every token of response i has the log-ratio log_prob - sg(log_prob) + sg(s_i), at most 10: its value is s_i, its gradient
    that of its own log_prob. L = max(-A rho, -A clip(rho, 1 - low, 1 + high)), without a second clip for A < 0. The paper
    clips much closer than PPO: ``clip_ratio_low=3e-4``, ``clip_ratio_high=4e-4``.

    Args:
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights: see `compute_policy_loss_vanilla`.
        loss_agg_mode: no effect: the mean over the responses of their means over tokens (seq-mean-token-mean).

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens of clipped responses), ``actor/ppo_kl`` (mean of old_log_prob - log_prob,
            clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    sequence_log_ratio = masked_mean(log_prob.detach() - old_log_prob, mask, axis=-1)[:, None]
    log_ratio = (log_prob - log_prob.detach() + sequence_log_ratio).clamp(max=10.0)
    unclipped, clipped = ppo_terms(log_ratio.exp(), advantages, config)
    losses = weighted(torch.maximum(unclipped, clipped), rollout_is_weights, mask)
    metrics = token_metrics(
        mask, config, pg_clipfrac=clipped > unclipped, ppo_kl=-clamped_log_ratio(log_prob, old_log_prob)
    )
    return agg_loss(losses, mask, "seq-mean-token-mean", **config.global_batch_info), metrics


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "seq-mean-token-mean",
    config: SapoSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """SAPO (arXiv:2511.20347): a soft gate of the ratio instead of a clip.

    rho = exp(clamp(log_prob - old_log_prob, +-20)); L = -A sigmoid(tau (rho - 1)) 4 / tau, tau = ``tau_pos`` where A > 0,
    else ``tau_neg``. At rho = 1 the gradient is that of PPO; away from it the gradient fades, the faster the larger tau.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: see `compute_policy_loss_vanilla`.
        loss_agg_mode: no effect: the mean over the responses of their means over tokens (seq-mean-token-mean).
        config: the ``actor`` section, with ``tau_pos`` and ``tau_neg``.

    Returns:
        loss: a scalar.
        metrics: ``actor/ppo_kl`` (mean of old_log_prob - log_prob, clamped), ``actor/sapo_gate`` (mean of the slope of the
            gate, 4 sigmoid (1 - sigmoid): 1 where rho = 1, 0 where nothing is learned).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill_(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    losses = weighted(-advantages * gate * 4.0 / tau, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, ppo_kl=-log_ratio, sapo_gate=4.0 * gate * (1.0 - gate))
    return agg_loss(losses, mask, "seq-mean-token-mean", **config.global_batch_info), metrics


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "seq-mean-token-sum",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """GMPO (arXiv:2507.20673): one ratio per response, the geometric mean of its tokens' clipped ratios.

    D = clamp(log_prob - old_log_prob, +-20); E = min(D, high) where A > 0, max(D, -low) where A < 0, 0 where A = 0. For a
    response rho = exp(mean_t E), A = mean_t A and L = -A rho; the loss is the mean over the responses with a token in the
    mask. The clip's offsets bound log-ratios here; the paper takes ``clip_ratio_low=clip_ratio_high=0.4``.

    Args:
        old_log_prob, log_prob, advantages, response_mask, config: see `compute_policy_loss_vanilla`.
        loss_agg_mode: no effect: the mean over the responses.
        rollout_is_weights: importance weights of the rollout; their geometric mean multiplies the loss of the response.

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens whose log-ratio the clip bounds), ``actor/ppo_kl`` (mean of old_log_prob -
            log_prob, clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    low, high = clip_range(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    lowest = torch.full_like(log_ratio, -math.inf).masked_fill_(advantages < 0, -low)
    highest = torch.full_like(log_ratio, math.inf).masked_fill_(advantages > 0, high)
    clipped = log_ratio.clamp(lowest, highest) * (advantages != 0)
    losses = -masked_mean(advantages, mask, axis=-1) * masked_mean(clipped, mask, axis=-1).exp()
    if rollout_is_weights is not None:
        losses = losses * _geometric_mean(rollout_is_weights.detach(), mask)
    clip_active = (log_ratio < lowest) | (log_ratio > highest)
    metrics = token_metrics(mask, config, pg_clipfrac=clip_active, ppo_kl=-log_ratio)
    # A matrix with one column, whose sum over tokens is the response's loss: denominators have one home.
    rows = mask.any(dim=-1, keepdim=True)
    return agg_loss(losses[:, None], rows, "seq-mean-token-sum", **config.global_batch_info), metrics


def _geometric_mean(
    rollout_is_weights: Float[Tensor, "batch response"], mask: Shaped[Tensor, "batch response"]
) -> Float[Tensor, " batch"]:
    check_finite(mask, rollout_is_weights=rollout_is_weights)
    return masked_mean(at_least_fp32(rollout_is_weights).log(), mask, axis=-1).exp()
