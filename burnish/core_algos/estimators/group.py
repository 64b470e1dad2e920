"""Estimators that compare the score of a response with those of the other responses to its prompt.

All give one number per row, on every token of its response mask, as advantages and as returns. Groups of equal scores get
exactly 0, and rows alone in their group what `settle` says.
"""

import torch

from burnish.core_algos.blocks import row_lengths
from burnish.core_algos.estimators.base import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    AdvantageSettings,
    TokenMask,
    TokenRewards,
    grouped_outcomes,
    on_every_token,
    register_adv_est,
    settle,
    single_rows_count,
)
from burnish.core_algos.groups import GroupIndex


@register_adv_est(AdvantageEstimator.GRPO)
@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    epsilon: float | int = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = (s - mean_g) / (std_g + epsilon) (arXiv:2402.03300), without the division: Dr.GRPO (arXiv:2503.20783).

    std_g is unbiased.

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False for Dr.GRPO.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `grouped_outcomes`.
    """
    mask, scores, groups = grouped_outcomes(token_level_rewards, response_mask, index)
    advantages, alone = scores - groups.mean(scores)[groups.ids], scores
    if norm_adv_by_std_in_grpo:
        advantages, alone = advantages / (groups.std(scores)[groups.ids] + epsilon), scores / (1 + epsilon)
    advantages = settle(advantages, scores, groups, alone if single_rows_count(config, num_repeat) else None)
    return on_every_token(advantages, token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    epsilon: float | int = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = (r_max - r_second) / (std_g + epsilon) for the best row of a group, 0 for the others (arXiv:2503.19595).

    r_max and r_second are the two best scores of the group, equal ones where the best row is not the only one; so a tie
    gets 0, as does a row alone in its group.

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation (unbiased).
        config: taken as by the other estimators here, but nothing that it allows gives a single row a second-best.
        num_repeat: likewise.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `grouped_outcomes`.
    """
    mask, scores, groups = grouped_outcomes(token_level_rewards, response_mask, index)
    best, second = groups.top_two(scores)
    lead = best - second
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(scores) + epsilon)
    advantages = torch.where(scores == best[groups.ids], lead[groups.ids], 0.0)
    return on_every_token(settle(advantages, scores, groups, alone=None), token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.RLOO)
@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = s - mean of the other rows of the group = (s - mean_g) N_g / (N_g - 1) (arXiv:2402.14740).

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `grouped_outcomes`.
    """
    mask, scores, groups = grouped_outcomes(token_level_rewards, response_mask, index)
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp(min=1)
    advantages = (scores - groups.mean(scores)[groups.ids]) * leave_one_out[groups.ids]
    advantages = settle(advantages, scores, groups, scores if single_rows_count(config, num_repeat) else None)
    return on_every_token(advantages, token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = s - sum_g(len s) / sum_g(len), len = tokens of m in the row (arXiv:2505.23585).

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `grouped_outcomes`.
    """
    mask, scores, groups = grouped_outcomes(token_level_rewards, response_mask, index)
    lengths = row_lengths(mask)
    baselines = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    alone = scores if single_rows_count(config, num_repeat) else None
    advantages = settle(scores - baselines[groups.ids], scores, groups, alone)
    return on_every_token(advantages, token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    f_norm: float | int = 1.0,
    alpha: float | int | None = None,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = alpha (s - mean_g) / f_norm (arXiv:2504.02546).

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        f_norm: the divisor.
        alpha: the factor; None: rows / max(1, rows whose score is not 0), which makes up for rows without a reward.
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `grouped_outcomes`.
    """
    mask, scores, groups = grouped_outcomes(token_level_rewards, response_mask, index)
    if alpha is None:
        alpha = len(scores) / max(1, int(scores.count_nonzero()))
    factor = alpha / f_norm
    alone = factor * scores if single_rows_count(config, num_repeat) else None
    advantages = settle(factor * (scores - groups.mean(scores)[groups.ids]), scores, groups, alone)
    return on_every_token(advantages, token_level_rewards, mask)
