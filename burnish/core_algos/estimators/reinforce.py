"""Estimators on top of plain returns: a baseline that is not of the group, or a whitening over the whole batch."""

import torch

from burnish.core_algos.estimators.base import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    AdvantageSettings,
    PerRow,
    TokenMask,
    TokenRewards,
    check_inputs,
    check_rows,
    grouped_outcomes,
    on_every_token,
    register_adv_est,
    settle,
    single_rows_count,
    whiten_outcomes,
)
from burnish.core_algos.groups import GroupIndex
from burnish.core_algos.scans import discounted_sum
from burnish.utils.torch_functional import masked_whiten


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    config: AdvantageSettings | None = None,
    gamma: float | int | None = None,
) -> AdvantagesAndReturns:
    """G_t = r_t + gamma G_{t+1}; A = G whitened over the batch (arXiv:2501.03262).

    "Next" is the next token of m: the return is carried across tokens outside it.

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        config: the ``algorithm`` section; its ``gamma`` is used when ``gamma`` is not given.
        gamma: discount per token; 1 when neither is given.

    Returns:
        advantages: whitened over the tokens of m.
        returns: G.

    Raises:
        TrainingError: see `check_inputs`.
    """
    if gamma is None:
        gamma = 1.0 if config is None else config.gamma
    mask = check_inputs(token_level_rewards, response_mask)
    returns = discounted_sum(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = s - mean_g on every token of m, whitened over the tokens of m in the batch (arXiv:2501.03262).

    Groups of equal scores get exactly 0 and are not in the whitening's mean and variance: how many of them a batch holds
    does not move the others. So do rows alone in their group (see `settle`).

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
    counts = ~groups.is_constant(scores)[groups.ids]
    alone = None
    if single_rows_count(config, num_repeat):
        counts, alone = counts | groups.is_single[groups.ids], scores
    advantages = settle(scores - groups.mean(scores)[groups.ids], scores, groups, alone)
    return on_every_token(whiten_outcomes(advantages, mask, counts), token_level_rewards, mask)


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: TokenRewards, reward_baselines: PerRow, response_mask: TokenMask
) -> AdvantagesAndReturns:
    """A_t = G_t - b with G_t = sum of the rewards from t on, and b that of a greedy response (arXiv:2310.10505).

    Args:
        token_level_rewards: r [batch, response].
        reward_baselines: b [batch], the reward of one greedy response to the row's prompt.
        response_mask: m [batch, response], bool or 0/1.

    Returns:
        advantages: A on the tokens of m.
        returns: G on the tokens of m; only their rewards are summed.

    Raises:
        TrainingError: see `check_inputs`; ``reward_baselines`` that do not fit the rows, or are NaN or inf.
    """
    mask = check_inputs(token_level_rewards, response_mask)
    check_rows(mask, reward_baselines=reward_baselines)
    returns = discounted_sum(token_level_rewards, mask, 1.0)
    advantages = returns - reward_baselines.to(returns).unsqueeze(-1)
    return advantages.masked_fill_(~mask, 0.0), returns
