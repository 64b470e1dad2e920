"""Weights and masks worked out on paper: the answers are numbers, the working is in the comments."""

from __future__ import annotations

import math

from burnish.conformance.batches import literal_batch
from burnish.conformance.correction.algorithm import HandAnswer

_LN2, _LN3 = math.log(2), math.log(3)

# Ratios r of the tokens in the mask: 2 and 1/2; 3; e^.1 three times. Log-probs of the rollout are -3 everywhere.
BATCH = literal_batch(
    [[1, 0, 1], [1, 0, 0], [1, 1, 1]],
    old_log_probs=[[-3 + _LN2, 0, -3 - _LN2], [-3 + _LN3, 0, 0], [-2.9, -2.9, -2.9]],
    rollout_log_probs=[[-3, -9, -3], [-3, -9, -9], [-3, -3, -3]],
)

WEIGHTS: dict[str, tuple[HandAnswer, ...]] = {
    # min(r, 2), with e^.1 = 1.105171; normalised: over their mean, (2 + .5 + 2 + 3 e^.1) / 6 = 1.302585.
    "token": (
        HandAnswer(settings={}, weights=[[2, 1, 0.5], [2, 1, 1], [1.1051709181, 1.1051709181, 1.1051709181]]),
        HandAnswer(
            settings={"rollout_is_batch_normalize": True},
            weights=[
                [1.5354078968, 1, 0.3838519742],
                [1.5354078968, 1, 1],
                [0.8484440774, 0.8484440774, 0.8484440774],
            ],
        ),
    ),
    # Products of the rows: 2 * 1/2 = 1; 3, truncated to 2; e^.3.
    "sequence": (HandAnswer(settings={}, weights=[[1, 1, 1], [2, 1, 1], [1.3498588076, 1.3498588076, 1.3498588076]]),),
}


def _rejects(threshold: str | float, *mask: list[int]) -> tuple[HandAnswer, ...]:
    return (HandAnswer(settings={"rollout_rs_threshold": threshold}, mask=list(mask)),)


_FIRST, _SECOND, _THIRD, _NONE = [1, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]

# k1 compares r with lower and upper. k2 = (log r)^2 / 2: .2402, .2402; .6035; .005. k3 = r - 1 - log r: .3069, .1931;
# .9014; .0052.
REJECTIONS: dict[str, tuple[HandAnswer, ...]] = {
    "token_k1": _rejects("0.4_2.5", _FIRST, _NONE, _THIRD),
    "token_k2": _rejects(0.3, _FIRST, _NONE, _THIRD),
    "token_k3": _rejects(0.25, [0, 0, 1], _NONE, _THIRD),
    # Products: 1; 3; e^.3 = 1.35. Sums of k2: .48; .60; .015. Sums of k3: .5; .90; .016.
    "seq_sum_k1": _rejects("0.8_1.2", _FIRST, _NONE, _NONE),
    "seq_sum_k2": _rejects(0.3, _NONE, _NONE, _THIRD),
    "seq_sum_k3": _rejects(0.4, _NONE, _NONE, _THIRD),
    # Geometric means: 1; 3; e^.1 = 1.105. Means of k2: .24; .60; .005. Means of k3: .25; .90; .005.
    "seq_mean_k1": _rejects("0.9_1.2", _FIRST, _NONE, _THIRD),
    "seq_mean_k2": _rejects(0.25, _FIRST, _NONE, _THIRD),
    "seq_mean_k3": _rejects(0.2, _NONE, _NONE, _THIRD),
    # The row goes if one of its tokens would.
    "seq_max_k1": _rejects("0.6_3.5", _NONE, _SECOND, _THIRD),
    "seq_max_k2": _rejects(0.3, _FIRST, _NONE, _THIRD),
    "seq_max_k3": _rejects(0.25, _NONE, _NONE, _THIRD),
}
