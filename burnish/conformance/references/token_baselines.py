"""The optimal token baseline as a naive loop, on the clock of the response and on that of its sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from burnish.conformance.references.estimators import alone_counts, rewards_to_go
from burnish.conformance.references.loops import Arguments, Matrix, kept, lists, siblings


def optimal_token_baseline(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """G_t - B_t, where rows of a group are compared at the same place of the response."""
    clocks = [{t: t for t in kept(row)} for row in lists(batch["response_mask"])]
    return _token_baseline(batch, settings, clocks)


def tir_optimal_token_baseline(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """G_t - B_t, where rows of a group are compared after the same number of sampled tokens."""
    clocks = [dict(enumerate(kept(row))) for row in lists(batch["response_mask"])]
    return _token_baseline(batch, settings, clocks)


def _token_baseline(
    batch: Arguments, settings: Mapping[str, Any], clocks: list[dict[int, int]]
) -> tuple[Matrix, Matrix]:
    """``clocks`` says for each row which token of the mask it has at which time."""
    index, returns = lists(batch["index"]), rewards_to_go(batch, 1.0)
    energies = _energies(batch)
    advantages = [[0.0] * len(row) for row in returns]
    for row, clock in enumerate(clocks):
        group = siblings(index, row)
        if len(group) == 1 and not alone_counts(settings):
            continue
        everything = [returns[i][t] for i in group for t in clocks[i].values()]
        if len(group) > 1 and max(everything) == min(everything):
            continue
        ends = sorted(max(clocks[i]) + 1 for i in group)
        for time, token in clock.items():
            beyond = settings["handle_zero_tail"] and len(group) > 1 and time >= ends[-2]
            baseline = 0.0
            if len(group) > 1 and not beyond:
                present = [(i, clocks[i][time]) for i in group if time in clocks[i]]
                weighted = sum(returns[i][t] * energies[i][t] for i, t in present)
                baseline = weighted / (sum(energies[i][t] for i, t in present) + 1e-8)
            advantages[row][token] = returns[row][token] - baseline
    return advantages, returns


def _energies(batch: Arguments) -> Matrix:
    """W_t: the sum of (1 - 2 pi + sum of pi^2) w^2 over the tokens of the mask up to t."""
    mask, old, squares = (lists(batch[key]) for key in ("response_mask", "old_log_probs", "sum_pi_squared"))
    weights = batch.get("rollout_is_weights")
    factors = [[1.0] * len(row) for row in mask] if weights is None else lists(weights)
    result = []
    for row, m in enumerate(mask):
        energy, so_far = [0.0] * len(m), 0.0
        for t in kept(m):
            so_far += (1 - 2 * math.exp(old[row][t]) + squares[row][t]) * factors[row][t] ** 2
            energy[t] = so_far
        result.append(energy)
    return result
