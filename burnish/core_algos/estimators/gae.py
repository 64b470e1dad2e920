"""Generalized advantage estimation: the one that trains a critic."""

import torch

from burnish.core_algos.blocks import over_rows, zeroed_outside
from burnish.core_algos.estimators.base import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    PerToken,
    TokenMask,
    TokenRewards,
    check_inputs,
    register_adv_est,
)
from burnish.core_algos.scans import generalized_advantage
from burnish.utils.torch_functional import masked_whiten


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: TokenRewards,
    values: PerToken,
    response_mask: TokenMask,
    gamma: float | int,
    lam: float | int,
) -> AdvantagesAndReturns:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438), whitened over m.

    "Next" is the next token of m: tokens outside it neither bootstrap nor accumulate.

    Args:
        token_level_rewards: r [batch, response].
        values: V [batch, response], of the state before each token.
        response_mask: m [batch, response], bool or 0/1.
        gamma: discount per token.
        lam: lambda of GAE.

    Returns:
        advantages: whitened over the tokens of m.
        returns: A + V, with A before whitening.

    Raises:
        TrainingError: see `check_inputs`.
    """
    mask = check_inputs(token_level_rewards, response_mask, values=values)
    advantages = generalized_advantage(token_level_rewards, values, mask, gamma, lam)
    returns = torch.empty_like(advantages)

    def add_values(rows: slice) -> None:
        returns[rows] = zeroed_outside(mask[rows], advantages[rows] + values[rows])

    over_rows(add_values, returns)
    return masked_whiten(advantages, mask), returns
