"""Losses that treat the tokens apart whose log-prob and advantage covary most, which is where entropy collapses.

Which tokens those are is decided over the whole mini-batch on all ranks (arXiv:2505.22617), before the update: a choice
made in each micro-batch would take other tokens, and at least one of every micro-batch.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.core_algos.policy_losses.base import (
    LossAndMetrics,
    PolicyLossSettings,
    clamped_log_ratio,
    loss_inputs,
    ppo_terms,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)
from burnish.utils.torch_functional import as_mask, check_shapes


@runtime_checkable
class ClipCovKeys(Protocol):
    """What `compute_policy_loss_clip_cov` reads of the section ``actor.policy_loss``."""

    @property
    def clip_cov_ratio(self) -> float: ...

    @property
    def clip_cov_lb(self) -> float: ...

    @property
    def clip_cov_ub(self) -> float: ...


@runtime_checkable
class ClipCovSettings(PolicyLossSettings, Protocol):
    """What `compute_policy_loss_clip_cov` reads."""

    @property
    def policy_loss(self) -> ClipCovKeys: ...


@runtime_checkable
class KlCovKeys(Protocol):
    """What `compute_policy_loss_kl_cov` reads of the section ``actor.policy_loss``."""

    @property
    def kl_cov_ratio(self) -> float: ...

    @property
    def ppo_kl_coef(self) -> float: ...


@runtime_checkable
class KlCovSettings(PolicyLossSettings, Protocol):
    """What `compute_policy_loss_kl_cov` reads."""

    @property
    def policy_loss(self) -> KlCovKeys: ...


@torch.no_grad()
def prepare_clip_cov(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    config: ClipCovSettings,
    *,
    noise: Float[Tensor, "batch response"] | None = None,
    collective: Collective = ONE_RANK,
) -> dict[str, Tensor]:
    """``keep`` [batch, response]: False on the tokens that clip_cov leaves out of the mini-batch, True elsewhere.

    Eligible are the tokens that PPO's clip leaves unclipped and whose (A - mean A)(log_prob - mean log_prob), with means
    over all tokens of the mini-batch, lies in (``clip_cov_lb``, ``clip_cov_ub``). Of these, the max(1, int(``clip_cov_ratio``
    tokens)) of the smallest noise are left out, or all where there are fewer. See `Prepare` for the arguments.
    """
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    keys = config.policy_loss
    covariance, num_tokens = _covariance(log_prob, advantages, mask, collective)
    unclipped, clipped = ppo_terms(clamped_log_ratio(log_prob, old_log_prob).exp(), advantages, config)
    eligible = mask & ~(clipped > unclipped) & (covariance > keys.clip_cov_lb) & (covariance < keys.clip_cov_ub)
    num_chosen = max(1, int(keys.clip_cov_ratio * num_tokens))
    chosen = _first(num_chosen, torch.zeros_like(covariance), _noise(noise, log_prob), eligible, collective)
    return {"keep": ~chosen}


@torch.no_grad()
def prepare_kl_cov(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    config: KlCovSettings,
    *,
    noise: Float[Tensor, "batch response"] | None = None,
    collective: Collective = ONE_RANK,
) -> dict[str, Tensor]:
    """``penalized`` [batch, response]: True on the tokens of the mini-batch that kl_cov holds back.

    Those are the max(1, int(``kl_cov_ratio`` tokens)) tokens of the largest (A - mean A)(log_prob - mean log_prob), with
    means over all tokens of the mini-batch; of tokens that are equal in this, those of the smallest noise. See `Prepare` for
    the arguments.
    """
    mask, _, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    covariance, num_tokens = _covariance(log_prob, advantages, mask, collective)
    num_chosen = max(1, int(config.policy_loss.kl_cov_ratio * num_tokens))
    # A log_prob of NaN has no covariance; the loss will be NaN and the update be skipped.
    eligible = mask & ~covariance.isnan()
    return {"penalized": _first(num_chosen, covariance, _noise(noise, log_prob), eligible, collective)}


@register_policy_loss("clip_cov", prepare=prepare_clip_cov)
def compute_policy_loss_clip_cov(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: ClipCovSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
    keep: Shaped[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """Clip-Cov (arXiv:2505.22617): PPO's clip, and weight 0 for a few random tokens of high covariance.

    rho = exp(clamp(log_prob - old_log_prob, +-20)); L = max(-A rho, -A clip(rho, 1 - low, 1 + high)), without a second clip
    for A < 0; 0 on the tokens that `prepare_clip_cov` leaves out, which stay in the denominator. At least one token is
    left out if any is eligible, also with ``clip_cov_ratio=0``.

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights: see
            `compute_policy_loss_vanilla`.
        config: the ``actor`` section, with ``policy_loss.clip_cov_ratio``, ``clip_cov_lb`` and ``clip_cov_ub``.
        keep: from `prepare_clip_cov`, for the whole mini-batch; None prepares here, on the tokens that are given.

    Returns:
        loss: a scalar.
        metrics: ``actor/pg_clipfrac`` (tokens that PPO clips), ``actor/clip_cov_frac`` (tokens that are left out),
            ``actor/ppo_kl`` (mean of old_log_prob - log_prob, clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    if keep is None:
        keep = prepare_clip_cov(old_log_prob, log_prob, advantages, response_mask, config)["keep"]
    keep = as_mask(keep, log_prob, "keep")
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    unclipped, clipped = ppo_terms(log_ratio.exp(), advantages, config)
    losses = weighted(torch.maximum(unclipped, clipped) * keep, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, pg_clipfrac=clipped > unclipped, clip_cov_frac=~keep, ppo_kl=-log_ratio)
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


@register_policy_loss("kl_cov", prepare=prepare_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Float[Tensor, "batch response"],
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str = "token-mean",
    config: KlCovSettings | None = None,
    rollout_is_weights: Float[Tensor, "batch response"] | None = None,
    penalized: Shaped[Tensor, "batch response"] | None = None,
) -> LossAndMetrics:
    """KL-Cov (arXiv:2505.22617): the ratio without a clip, and a KL term on the few tokens of the highest covariance.

    rho = exp(clamp(log_prob - old_log_prob, +-20)); L = -A rho, plus ``ppo_kl_coef`` abs(log_prob - old_log_prob) on the
    tokens that `prepare_kl_cov` chooses. At least one token is chosen, also with ``kl_cov_ratio=0``.

    Args:
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights: see
            `compute_policy_loss_vanilla`.
        config: the ``actor`` section, with ``policy_loss.kl_cov_ratio`` and ``ppo_kl_coef``.
        penalized: from `prepare_kl_cov`, for the whole mini-batch; None prepares here, on the tokens that are given.

    Returns:
        loss: a scalar.
        metrics: ``actor/kl_cov_frac`` (tokens with the KL term), ``actor/ppo_kl`` (mean of old_log_prob - log_prob,
            clamped).

    Raises:
        ConfigError: no config.
        TrainingError: see `compute_policy_loss_vanilla`.
    """
    config = required(config)
    if penalized is None:
        penalized = prepare_kl_cov(old_log_prob, log_prob, advantages, response_mask, config)["penalized"]
    penalized = as_mask(penalized, log_prob, "penalized")
    mask, old_log_prob, log_prob, advantages = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    # Not clamped, unlike the ratio: the further a token has gone, the more it needs the pull back.
    penalty = config.policy_loss.ppo_kl_coef * (log_prob - old_log_prob).abs()
    losses = -advantages * log_ratio.exp() + torch.where(penalized, penalty, 0.0)
    losses = weighted(losses, rollout_is_weights, mask)
    metrics = token_metrics(mask, config, kl_cov_frac=penalized, ppo_kl=-log_ratio)
    return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), metrics


def _covariance(
    log_prob: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    collective: Collective,
) -> tuple[Float[Tensor, "batch response"], int]:
    """(A - mean A)(log_prob - mean log_prob) over the tokens of all ranks, and their number.

    In float64, where sums of fp32 values are as good as exact: the same means come out however the rows are spread.
    """
    log_prob, advantages = log_prob.double(), advantages.double()
    count, log_prob_sum, advantage_sum = collective.sum(torch.stack([mask.sum(), log_prob.sum(), advantages.sum()]))
    num_tokens = count.clamp(min=1)
    return (advantages - advantage_sum / num_tokens) * (log_prob - log_prob_sum / num_tokens), int(count)


def _noise(noise: Tensor | None, like: Float[Tensor, "batch response"]) -> Float[Tensor, "batch response"]:
    if noise is None:
        noise = torch.rand(like.shape, generator=torch.Generator().manual_seed(0)).to(like.device)
    check_shapes(like, noise=noise)
    return noise


def _first(
    count: int,
    value: Float[Tensor, "batch response"],
    noise: Float[Tensor, "batch response"],
    eligible: Bool[Tensor, "batch response"],
    collective: Collective,
) -> Bool[Tensor, "batch response"]:
    """The ``count`` eligible tokens of the largest value over all ranks; of equal values those of the smallest noise.

    More are chosen only where value and noise of the last one both occur again.
    """
    mine = _ordered(torch.stack([value[eligible], noise[eligible].double()], dim=-1))[:count]
    chosen = _ordered(collective.gather(mine.flatten()).unflatten(0, (-1, 2)))[:count]
    if len(chosen) == 0:
        return torch.zeros_like(eligible)
    last_value, last_noise = chosen[-1]
    return eligible & ((value > last_value) | ((value == last_value) & (noise <= last_noise)))


def _ordered(pairs: Float[Tensor, "token 2"]) -> Float[Tensor, "token 2"]:
    """(value, noise) by falling value, then by rising noise."""
    pairs = pairs[pairs[:, 1].argsort(stable=True)]
    return pairs[pairs[:, 0].argsort(stable=True, descending=True)]
