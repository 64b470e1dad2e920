"""Losses whose gradient goes through log_prob and not through the ratio: GPG, CISPO and DRO."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    clip_range,
    loss_inputs,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)


@runtime_checkable
class DroKeys(Protocol):
    """What `compute_policy_loss_dro` reads of the section ``actor.policy_loss``."""

    @property
    def dro_beta(self) -> float: ...


@runtime_checkable
class DroSettings(PolicyLossSettings, Protocol):
    """What `compute_policy_loss_dro` reads."""

    @property
    def policy_loss(self) -> DroKeys: ...


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """The plain policy gradient of GPG (arXiv:2504.02546): L = -A log_prob.

    No ratio and no clip: it knows no old policy, so it fits one update per batch.

    Args:
        old_log_prob: for the metric alone.
        log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights: see `compute_policy_loss_vanilla`.

    Returns:
        loss: a scalar.
        metrics: ``actor/ppo_kl`` (mean of old_log_prob - log_prob, clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses = weighted(-advantages * log_prob, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, ppo_kl=-clamped_log_ratio(log_prob, old_log_prob))
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: PolicyLossSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """CISPO (arXiv:2506.13585): L = -sg(clip(rho, 1 - low, 1 + high)) A log_prob.

    The clip bounds the weight of a token's gradient and never takes the gradient away. rho = exp(clamp(log_prob -
    old_log_prob, +-20)). The paper bounds the weight from above only: ``clip_ratio_low=1``.

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights: see
            `compute_policy_loss_vanilla`.

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens whose weight is clipped), ``actor/ppo_kl`` (mean of old_log_prob - log_prob,
            clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    low, high = clip_range(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    losses = weighted(-clipped * advantages * log_prob, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, pg_clipfrac=clipped != ratio, ppo_kl=-log_ratio)
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: DroSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """Direct reward optimisation (arXiv:2405.19107): L = -(A log_prob - beta / 2 (log_prob - old_log_prob)^2).

    A quadratic pull towards the old policy instead of a clip; beta = ``policy_loss.dro_beta``. The paper learns a value
    function with it; here A comes from any advantage estimator.

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights: see
            `compute_policy_loss_vanilla`.
        config: the ``actor`` section, with ``policy_loss.dro_beta``.

    Returns:
        loss: a scalar.
        metrics: ``actor/ppo_kl`` (mean of old_log_prob - log_prob, clamped), ``actor/dro_penalty`` (mean of the quadratic
            term).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    penalty = 0.5 * config.policy_loss.dro_beta * (log_prob - old_log_prob).square()
    losses = weighted(penalty - advantages * log_prob, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, ppo_kl=-clamped_log_ratio(log_prob, old_log_prob), dro_penalty=penalty)
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics
