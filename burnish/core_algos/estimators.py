"""Advantage estimators: from rewards per token to (advantages, returns), both zero outside the response mask.

An estimator is a function that names what it needs as its parameters: keys of the batch (``token_level_rewards``,
``response_mask``, ``values``, ...), ``index`` (the ``uid`` of each row), or a setting (``gamma``, ``lam``,
``num_repeat``, ``norm_adv_by_std_in_grpo``, ``config``). `burnish.core_algos.advantages.compute_advantage` hands
them over, and only those rows that count: a row whose reward abstained never reaches an estimator.

Notation: m = response mask, r_t = rewards per token, s = sum_t r_t, g = group (rows of one uid).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.groups import GroupIndex, Groups
from burnish.core_algos.scans import discounted_sum, generalized_advantage
from burnish.utils.registry import Registry
from burnish.utils.torch_functional import as_mask, at_least_fp32, check_shapes, masked_whiten

AdvantagesAndReturns = tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]


class AdvantageEstimator(StrEnum):
    """Names of the built-in estimators, as in ``algorithm.adv_estimator``."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


@runtime_checkable
class AdvantageSettings(Protocol):
    """What estimators read of the ``algorithm`` section."""

    @property
    def gamma(self) -> float: ...

    @property
    def allow_single_sample_groups(self) -> bool: ...


ADV_ESTIMATORS: Registry[Callable[..., AdvantagesAndReturns]] = Registry(
    "advantage estimator", "algorithm.adv_estimator"
)


def register_adv_est(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers an estimator under ``name`` (a string or an `AdvantageEstimator`)."""
    return ADV_ESTIMATORS.register(str(name))


def get_adv_estimator_fn(name: str) -> Callable[..., AdvantagesAndReturns]:
    """The estimator called ``name``, or the one at ``package.module:attribute``.

    Raises:
        ConfigError: no such estimator; lists the choices.
    """
    return ADV_ESTIMATORS.get(str(name))


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    gamma: float | int,
    lam: float | int,
) -> AdvantagesAndReturns:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438), whitened over m.

    "Next" is the next token of m: tokens outside it neither bootstrap nor accumulate.

    Args:
        token_level_rewards: r.
        values: V, of the state before each token.
        response_mask: m, bool or 0/1.
        gamma: discount per token.
        lam: lambda of GAE.

    Returns:
        advantages: whitened over the tokens of m.
        returns: A + V, with A before whitening.
    """
    mask = as_mask(response_mask, token_level_rewards, "response_mask")
    check_shapes(token_level_rewards, values=values)
    advantages = generalized_advantage(token_level_rewards, values, mask, gamma, lam)
    returns = torch.where(mask, advantages + values, 0.0)
    return masked_whiten(advantages, mask), returns


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: GroupIndex,
    epsilon: float | int = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = (s - mean_g) / (std_g + epsilon) (arXiv:2402.03300), without the division: Dr.GRPO (arXiv:2503.20783).

    std_g is unbiased. A group of equal scores gets exactly 0, a row alone in its group likewise (see `_settle`).

    Args:
        token_level_rewards: r.
        response_mask: m, bool or 0/1.
        index: uid per row.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False for Dr.GRPO.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.
    """
    mask = as_mask(response_mask, token_level_rewards, "response_mask")
    scores = outcome_scores(token_level_rewards, mask)
    groups = Groups.of(index, len(scores), scores.device)
    advantages = scores - groups.mean(scores)[groups.ids]
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores)[groups.ids] + epsilon)
    alone = scores / (1 + epsilon) if norm_adv_by_std_in_grpo else scores
    advantages = _settle(advantages, scores, groups, alone if _single_rows_count(config, num_repeat) else None)
    return _on_every_token(advantages, token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: GroupIndex,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = s - mean of the other rows of the group = (s - mean_g) N_g / (N_g - 1) (arXiv:2402.14740).

    A group of equal scores gets exactly 0, a row alone in its group likewise (see `_settle`).

    Args:
        token_level_rewards: r.
        response_mask: m, bool or 0/1.
        index: uid per row.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.
    """
    mask = as_mask(response_mask, token_level_rewards, "response_mask")
    scores = outcome_scores(token_level_rewards, mask)
    groups = Groups.of(index, len(scores), scores.device)
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp(min=1)
    advantages = (scores - groups.mean(scores)[groups.ids]) * leave_one_out[groups.ids]
    advantages = _settle(advantages, scores, groups, scores if _single_rows_count(config, num_repeat) else None)
    return _on_every_token(advantages, token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    config: AdvantageSettings | None = None,
    gamma: float | int | None = None,
) -> AdvantagesAndReturns:
    """G_t = r_t + gamma G_{t+1}; A = G whitened over the batch (arXiv:2501.03262).

    "Next" is the next token of m: the return is carried across tokens outside it.

    Args:
        token_level_rewards: r.
        response_mask: m, bool or 0/1.
        config: the ``algorithm`` section; its ``gamma`` is used when ``gamma`` is not given.
        gamma: discount per token; 1 when neither is given.

    Returns:
        advantages: whitened over the tokens of m.
        returns: G.
    """
    if gamma is None:
        gamma = 1.0 if config is None else config.gamma
    mask = as_mask(response_mask, token_level_rewards, "response_mask")
    returns = discounted_sum(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask), returns


def outcome_scores(
    token_level_rewards: Float[Tensor, "batch response"], mask: Shaped[Tensor, "batch response"]
) -> Float[Tensor, " batch"]:
    """s = sum_t r_t in float64. Not masked, but what is not finite outside the mask is padding and no reward."""
    rewards = at_least_fp32(token_level_rewards)
    scores = rewards.sum(dim=-1)
    if not scores.isfinite().all():
        scores = torch.where(mask | rewards.isfinite(), rewards, 0.0).sum(dim=-1)
    return scores.double()


def _single_rows_count(config: AdvantageSettings | None, num_repeat: int) -> bool:
    return config is not None and config.allow_single_sample_groups and num_repeat == 1


def _settle(
    advantages: Float[Tensor, " batch"],
    scores: Float[Tensor, " batch"],
    groups: Groups,
    alone: Float[Tensor, " batch"] | None,
) -> Float[Tensor, " batch"]:
    """Gives the rows that have nothing to be compared with their advantage.

    Groups of equal scores (max == min) get exactly 0: float noise divided by a tiny deviation is not an advantage.
    So does a row that is alone in its group, being what its siblings left behind; where single rows are wanted
    (one response per prompt and ``algorithm.allow_single_sample_groups``) it gets ``alone`` instead.
    """
    settled = torch.where(groups.is_constant(scores)[groups.ids], 0.0, advantages)
    return settled if alone is None else torch.where(groups.sizes[groups.ids] == 1, alone, settled)


def _on_every_token(
    advantages: Float[Tensor, " batch"],
    like: Float[Tensor, "batch response"],
    mask: Shaped[Tensor, "batch response"],
) -> AdvantagesAndReturns:
    dtype = torch.promote_types(like.dtype, torch.float32)
    spread = torch.where(mask, advantages.to(dtype).unsqueeze(-1), 0.0)
    # Two tensors, not one under two names: whoever changes the advantages in place must not change the returns.
    return spread, spread.clone()
