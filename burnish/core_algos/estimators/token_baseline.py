"""Optimal token baselines: one baseline per prompt and token, weighted by how much the gradient varies up to there.

With G_t = sum of the rewards from t on, and the squared norm of the score function summed up to t,
    W_t = sum_{j <= t} (1 - 2 pi_j + sum pi_j^2) w_j^2 m_j,   pi = probability of the token, w = rollout weight or 1,
the baseline that leaves the least variance is B_t = sum_g(G_t W_t m) / sum_g(W_t m).

The work goes over blocks of rows twice, to compute the terms of these two sums and to subtract their quotient, so that what is
needed on the way stays in the cache.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import hardshrink

from burnish.core_algos.blocks import over_rows, row_lengths, zeroed_outside
from burnish.core_algos.estimators.base import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    AdvantageSettings,
    PerToken,
    TokenMask,
    TokenRewards,
    check_inputs,
    register_adv_est,
    single_rows_count,
)
from burnish.core_algos.groups import GroupIndex, Groups
from burnish.core_algos.scans import rewards_to_go
from burnish.utils.torch_functional import at_least_fp32

_Matrix = Float[Tensor, "batch response"]
_Mask = Bool[Tensor, "batch response"]


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    rollout_is_weights: PerToken | None = None,
    handle_zero_tail: bool = True,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A_t = G_t - B_t, B_t = sum_g(G_t W_t m) / (sum_g(W_t m) + 1e-8) with W_t as at the top of this file.

    A group whose G_t are all equal gets exactly 0; so does a row alone in its group, unless single rows are wanted (one
    response per prompt and ``algorithm.allow_single_sample_groups``): then B = 0.

    Args:
        token_level_rewards: r [batch, response].
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        old_log_probs: log pi of each token [batch, response].
        sum_pi_squared: sum over the vocabulary of pi^2 [batch, response].
        rollout_is_weights: w [batch, response]; None: 1.
        handle_zero_tail: B = 0 where the longest row of a group goes on after the second-longest has ended: alone there, it
            would be its own baseline and learn nothing. A row ends with its last token of m (verl counts the tokens of m,
            which is another place in a row with gaps).
        config: the ``algorithm`` section, for its ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages: A on the tokens of m.
        returns: G on the tokens of m; only their rewards are summed.

    Raises:
        TrainingError: see `check_inputs` and `Groups.of`.
    """
    inputs = _Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _estimate(inputs, index, handle_zero_tail, single_rows_count(config, num_repeat), compact=False)


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_tir_optimal_token_baseline_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    rollout_is_weights: PerToken | None = None,
    handle_zero_tail: bool = True,
    config: AdvantageSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """`compute_optimal_token_baseline_advantage` on sampled tokens alone, for responses with tool output in them.

    The k-th sampled token of a row is compared with the k-th sampled tokens of the others, wherever they lie.

    Args, returns and raises: those of `compute_optimal_token_baseline_advantage`.
    """
    inputs = _Inputs(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _estimate(inputs, index, handle_zero_tail, single_rows_count(config, num_repeat), compact=True)


@dataclass(frozen=True, slots=True)
class _Inputs:
    token_level_rewards: Tensor
    response_mask: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor | None

    def checked_mask(self) -> Tensor:
        per_token = {"old_log_probs": self.old_log_probs, "sum_pi_squared": self.sum_pi_squared}
        if self.rollout_is_weights is not None:
            per_token["rollout_is_weights"] = self.rollout_is_weights
        return check_inputs(self.token_level_rewards, self.response_mask, **per_token)

    def path_variances(self, rows: slice, mask: _Mask) -> _Matrix:
        """W of these rows."""
        # The squared norm of the gradient of log pi by the logits.
        steps = at_least_fp32(self.old_log_probs[rows]).clamp(max=20.0).exp_().mul_(-2.0).add_(1.0)
        # Where a token is certain only rounding is left, of either sign, and a sum of it may be near zero: no divisor.
        steps = hardshrink(steps + self.sum_pi_squared[rows], 1e-6)
        if self.rollout_is_weights is not None:
            steps = steps * at_least_fp32(self.rollout_is_weights[rows]).square()
        return zeroed_outside(mask, steps).cumsum(dim=1)


def _estimate(
    inputs: _Inputs, index: GroupIndex, handle_zero_tail: bool, single_rows: bool, compact: bool
) -> AdvantagesAndReturns:
    mask = inputs.checked_mask()
    groups = Groups.of(index, len(mask), mask.device)
    returns, products, weights, constant = _terms(inputs, mask, groups, compact)
    baselines, denominators = groups.sum_rows(products, weights)
    baselines /= denominators.add_(1e-8)
    del products, denominators
    if handle_zero_tail:
        _, shared = groups.top_two(_ends(mask, compact))
        position = torch.arange(mask.shape[1], device=mask.device)
        baselines.masked_fill_(position >= shared.unsqueeze(-1), 0.0)
    baselines[groups.is_single] = 0.0
    # The weights are summed up: their place is free.
    advantages = weights

    def subtract(rows: slice) -> None:
        m, baseline = mask[rows], baselines[groups.ids[rows]].to(returns.dtype)
        if compact:
            baseline = baseline.gather(1, _places(m).clamp_(max=mask.shape[1] - 1))
        advantages[rows] = zeroed_outside(m, returns[rows] - baseline)

    over_rows(subtract, advantages)
    nothing_to_compare = constant & ~groups.is_single if single_rows else constant | groups.is_single
    advantages[nothing_to_compare[groups.ids]] = 0.0
    return advantages, returns


def _terms(
    inputs: _Inputs, mask: _Mask, groups: Groups, compact: bool
) -> tuple[_Matrix, _Matrix, _Matrix, Bool[Tensor, " group"]]:
    """G; G W and W, compact if so asked; and whether all G_t of a group are equal."""
    returns = at_least_fp32(torch.empty_like(inputs.token_level_rewards))
    products, weights = torch.empty_like(returns), torch.empty_like(returns)
    totals, varies = returns.new_empty(len(mask)), returns.new_empty(len(mask))

    def compute(rows: slice) -> None:
        m = mask[rows]
        g = rewards_to_go(inputs.token_level_rewards[rows], m)
        totals[rows], varies[rows] = g[:, 0], ((g != g[:, :1]) & m).any(dim=1)
        g, w = zeroed_outside(m, g), zeroed_outside(m, inputs.path_variances(rows, m))
        returns[rows] = g
        if compact:
            places = _places(m)
            g, w = _to_front(g, places), _to_front(w, places)
        products[rows], weights[rows] = g * w, w

    over_rows(compute, returns)
    return returns, products, weights, groups.is_constant(totals) & (groups.sum(varies) == 0)


def _ends(mask: _Mask, compact: bool) -> Float[Tensor, " batch"]:
    """Where each row ends: after its last token of the mask or, compact, after as many as it has; 0 without any."""
    if compact:
        return row_lengths(mask).double()
    numbers = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    ends = numbers.new_empty(len(mask))

    def find(rows: slice) -> None:
        ends[rows] = (mask[rows] * numbers).amax(dim=1)

    over_rows(find, mask)
    return ends.double()


def _places(mask: _Mask) -> Int[Tensor, "batch response"]:
    """Which token of the mask each token is, counted from 0 in its row; outside the mask the width."""
    return torch.where(mask, mask.cumsum(dim=1) - 1, mask.shape[1])


def _to_front(matrix: _Matrix, places: Int[Tensor, "batch response"]) -> _Matrix:
    """The entries at their places; 0 after the last."""
    return matrix.new_zeros(len(matrix), matrix.shape[1] + 1).scatter_(1, places, matrix)[:, :-1]
