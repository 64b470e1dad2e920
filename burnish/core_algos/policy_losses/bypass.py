"""The loss of the bypass mode: the old policy is the one that sampled, and its correction happens inside the loss."""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.config import RolloutCorrectionConfig
from burnish.config.rejection import parse_rejection
from burnish.core_algos.aggregation import agg_loss, token_mean
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.core_algos.importance_weights import bounded_weights, importance_ratios, mean_weight
from burnish.core_algos.policy_difference import LOG_RATIO_BOUND, k_statistic, rollout_log_ratio
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    loss_inputs,
    register_policy_loss,
    required,
    token_metrics,
)
from burnish.core_algos.policy_losses.vanilla import compute_policy_loss_vanilla
from burnish.core_algos.rollout_correction import RolloutCorrectionSettings, reject
from burnish.utils.errors import ConfigError
from burnish.utils.torch_functional import as_mask, at_least_fp32, check_finite, zero_outside


@runtime_checkable
class BypassCorrection(RolloutCorrectionSettings, Protocol):
    """What the loss reads of the section ``algorithm.rollout_correction``."""

    @property
    def loss_type(self) -> str: ...


@runtime_checkable
class BypassKeys(Protocol):
    """What the loss reads of the section ``actor_rollout_ref.actor.policy_loss``."""

    @property
    def rollout_correction(self) -> BypassCorrection | None: ...


@runtime_checkable
class BypassSettings(PolicyLossSettings, Protocol):
    """What the loss reads of the section ``actor_rollout_ref.actor``."""

    @property
    def policy_loss(self) -> BypassKeys: ...


def needs_whole_mini_batch(config: BypassSettings) -> bool:
    """Whether rejection changes the denominators of the mini-batch, or weights are divided by their mean over it."""
    correction = _correction(config)
    return correction.rollout_rs is not None or _normalizes(correction)


def prepare_bypass_mode(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    config: BypassSettings,
    *,
    noise: Float[Tensor, "batch response"] | None = None,
    collective: Collective = ONE_RANK,
) -> dict[str, Tensor] | None:
    """What of the correction depends on the whole mini-batch; see `compute_policy_loss_bypass_mode`.

    Args:
        old_log_prob: of the policy that sampled.
        log_prob: of the policy, without gradient.
        advantages, noise: not used.
        response_mask: the loss mask, bool or 0/1.
        config: the ``actor`` section.
        collective: the ranks that the mini-batch is spread over.

    Returns:
        response_mask, if there is ``rollout_rs``: without what is rejected.
        rejected_fraction, likewise: the share of the mini-batch's tokens that is rejected, on every entry.
        rollout_is_weights, if the loss multiplies any: normalised over the tokens that are left on all ranks.
    """
    correction = _correction(config)
    mask = as_mask(response_mask, log_prob, "response_mask")
    check_finite(mask, old_log_prob=old_log_prob)
    log_ratio = rollout_log_ratio(log_prob, old_log_prob, mask)
    prepared: dict[str, Tensor] = {}
    kept = mask
    if correction.rollout_rs is not None:
        rules = parse_rejection(correction.rollout_rs, correction.rollout_rs_threshold)
        kept, _ = reject(log_ratio, mask, rules)
        left, num_tokens = collective.sum(torch.stack([kept.sum(), mask.sum()]).double()).unbind()
        rejected_fraction = (num_tokens - left) / num_tokens.clamp(min=1)
        prepared["response_mask"] = kept
        prepared["rejected_fraction"] = rejected_fraction.float().expand(mask.shape).clone()
    if _multiplies_weights(correction):
        weights = _weights(log_ratio, mask, correction)
        if _normalizes(correction):
            weights = weights / mean_weight(weights, kept, collective)
        prepared["rollout_is_weights"] = weights.to(at_least_fp32(log_prob).dtype)
    return prepared


@register_policy_loss("bypass_mode", prepare=prepare_bypass_mode, prepare_when=needs_whole_mini_batch)
def compute_policy_loss_bypass_mode(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: BypassSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
    rejected_fraction: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """A loss against the policy that sampled, with that policy's correction by the current one inside.

    log r = log_prob - old_log_prob, where old_log_prob is that of the rollout. By ``rollout_correction.loss_type``:

    ppo_clip: `compute_policy_loss_vanilla`. Its ratio is r already, so weights of ``rollout_is`` are not multiplied, but
        reported.
    reinforce: L = -w A log_prob, with w of ``rollout_is`` (see `compute_rollout_correction_and_rejection_mask`), without
        gradient; w = 1 where that is null.

    ``rollout_rs`` takes tokens or rows out of the mask and out of the denominators, and ``rollout_is_batch_normalize``
    divides w by its mean over the tokens left. Deviation: both happen once for a whole mini-batch on all ranks, before
    its update; verl does so in every micro-batch, and keeps the denominators. Where that preparation is missing, the loss
    takes what it is given for the whole mini-batch; it does not count ``config.global_batch_info`` anew.

    Args:
        old_log_prob: of the policy that sampled.
        log_prob: of the policy, with gradient.
        advantages: A.
        response_mask: the loss mask, bool or 0/1.
        loss_agg_mode: see `agg_loss`.
        config: the ``actor`` section; ``policy_loss.rollout_correction`` is ``algorithm.rollout_correction``, its
            defaults where it is None.
        rollout_is_weights: w, from the preparation; None computes it here.
        rejected_fraction: from the preparation; None, with ``rollout_rs``, rejects here.

    Returns:
        loss: a scalar.
        metrics: as means over the tokens that are left, adding up over micro-batches and ranks: those of vanilla or, for
            reinforce, ``actor/ppo_kl`` (mean of -log r); ``rollout_corr/kl`` (-log r), ``rollout_corr/k3_kl``
            (r - 1 - log r); with ``rollout_rs`` ``rollout_corr/rollout_rs_masked_fraction``; with ``rollout_is``
            ``rollout_corr/rollout_is_mean`` (w before it is normalised) and ``rollout_is_max``, ``_min`` (before it is
            truncated too; they combine by max and min). These three take the ratio of a row from its tokens that are left,
            where w has it from all.

    Raises:
        ConfigError: no config, or what it says of the correction is wrong.
        TrainingError: shapes that differ, a mask that is none, or NaN or inf in a constant inside the mask.
    """
    config = required(config)
    correction = _correction(config)
    is_rejected = correction.rollout_rs is None or rejected_fraction is not None
    is_normalized = not _normalizes(correction) or rollout_is_weights is not None
    if not (is_rejected and is_normalized):
        prepared = prepare_bypass_mode(old_log_prob, log_prob, advantages, response_mask, config) or {}
        response_mask = prepared.get("response_mask", response_mask)
        rejected_fraction = prepared.get("rejected_fraction")
        rollout_is_weights = prepared.get("rollout_is_weights") if rollout_is_weights is None else rollout_is_weights
    mask, old, new, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = rollout_log_ratio(new, old, mask)
    num_tokens = config.global_batch_info.get("batch_num_tokens")
    metrics = _rollout_metrics(log_ratio, mask, correction, num_tokens)
    if rejected_fraction is not None:
        # Every token left carries the fraction, so that it adds up even where whole micro-batches are rejected.
        metrics["rollout_corr/rollout_rs_masked_fraction"] = token_mean(rejected_fraction, mask, num_tokens)
    if correction.loss_type == "ppo_clip":
        loss, ppo_metrics = compute_policy_loss_vanilla(old, new, advantages, mask, loss_agg_mode, config)
        return loss, ppo_metrics | metrics
    if correction.rollout_is is not None and rollout_is_weights is None:
        rollout_is_weights = _weights(log_ratio, mask, correction)
    losses = -advantages * new
    if rollout_is_weights is not None:
        # Not `weighted`: these weights come from log_prob, whose NaN must surface in the loss.
        (weights,) = zero_outside(mask, rollout_is_weights=rollout_is_weights.detach())
        losses = losses * weights.to(losses.dtype)
    metrics |= token_metrics(mask, config, ppo_kl=-clamped_log_ratio(new, old))
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


def _correction(config: BypassSettings) -> BypassCorrection:
    correction = config.policy_loss.rollout_correction or RolloutCorrectionConfig()
    if correction.loss_type not in ("ppo_clip", "reinforce"):
        raise ConfigError(
            f"algorithm.rollout_correction.loss_type={correction.loss_type}: there is no such loss. "
            f"Known: ppo_clip, reinforce."
        )
    return correction


def _multiplies_weights(correction: BypassCorrection) -> bool:
    return correction.rollout_is is not None and correction.loss_type == "reinforce"


def _normalizes(correction: BypassCorrection) -> bool:
    return _multiplies_weights(correction) and correction.rollout_is_batch_normalize


def _weights(log_ratio: Tensor, mask: Tensor, correction: BypassCorrection) -> Tensor:
    assert correction.rollout_is is not None
    ratios = importance_ratios(log_ratio, mask, correction.rollout_is)
    return bounded_weights(ratios, correction.rollout_is_threshold)


def _rollout_metrics(
    log_ratio: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    correction: BypassCorrection,
    num_tokens: int | float | Tensor | None,
) -> dict[str, Tensor]:
    """Shares of the means over the optimizer step's tokens, and extremes."""
    metrics = {
        "rollout_corr/kl": token_mean(k_statistic(log_ratio, "k1"), mask, num_tokens),
        "rollout_corr/k3_kl": token_mean(k_statistic(log_ratio, "k3"), mask, num_tokens),
    }
    if correction.rollout_is is None:
        return metrics
    ratios = importance_ratios(log_ratio, mask, correction.rollout_is)
    # A micro-batch without a token has extremes that no other's can lose to.
    largest, smallest = math.exp(LOG_RATIO_BOUND), math.exp(-LOG_RATIO_BOUND)
    return metrics | {
        "rollout_corr/rollout_is_mean": token_mean(
            bounded_weights(ratios, correction.rollout_is_threshold), mask, num_tokens
        ),
        "rollout_corr/rollout_is_max": torch.where(mask, ratios, smallest).max(),
        "rollout_corr/rollout_is_min": torch.where(mask, ratios, largest).min(),
    }
