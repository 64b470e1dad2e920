"""Advantages worked out on paper, one estimator after the other: the answers are numbers, the working is in the comments."""

from __future__ import annotations

import math

from burnish.conformance.batches import literal_batch
from burnish.conformance.estimators.algorithm import HandAnswer

# Five rows of two interleaved groups; scores a: 1, 0, 2 and b: 3, 1, on the last token of the mask.
_UIDS = ["a", "b", "a", "b", "a"]
_MASK = [[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0], [0, 1, 1]]
_REWARDS = [[0, 1, 0], [0, 0, 3], [0, 0, 0], [1, 0, 0], [0, 0, 2]]
_FIVE_ROWS = literal_batch(
    _MASK,
    uids=_UIDS,
    rewards=_REWARDS,
    # GDPO: the scores, and a component that varies in group a alone.
    reward_components=[[1, 0], [3, 5], [0, 0], [1, 5], [2, 3]],
)


def _per_row(*advantages: float) -> list[list[float]]:
    return [[a if inside else 0.0 for inside in row] for a, row in zip(advantages, _MASK, strict=True)]


# Tokens 0 and 2 count, V = .2 and .5, r = 0 and 1, gamma .99, lambda .95:
# delta_2 = 1 - .5 = .5; delta_0 = .99 * .5 - .2 = .295; A_2 = .5; A_0 = .295 + .99 * .95 * .5 = .76525.
# Returns A + V = .96525 and 1. Two values whiten to +-1/sqrt(2): deviation .132625 of each from the mean, variance
# 2 * .132625^2 = .0351788, and 1e-8 beside it is 1.4e-7 of the result.
_GAE = HandAnswer(
    batch=literal_batch([[1, 0, 1]], rewards=[[0, 0, 1]], values=[[0.2, 9, 0.5]]),
    settings={"gamma": 0.99, "lam": 0.95},
    advantages=[[0.7071067812, 0, -0.7071067812]],
    returns=[[0.96525, 0, 1]],
    tolerance=2e-7,
)

# a: mean 1, deviations 0, -1, 1, so std = sqrt(2 / 2) = 1; b: mean 2, deviations 1, -1, std = sqrt(2). Epsilon is 1e-6:
# 1 / 1.000001 = .999999 and 1 / (sqrt(2) + .000001) = .7071062812.
_GRPO = HandAnswer(batch=_FIVE_ROWS, advantages=_per_row(0, 0.7071062812, -0.999999, -0.7071062812, 0.999999))

# a: the best score is 2, the second 1; b: 3 and 1. The standard deviations are those of GRPO above: 1 and 2 over them.
_PASSK = HandAnswer(batch=_FIVE_ROWS, advantages=_per_row(0, 1.4142125624, 0, 0, 0.999999))

# a: 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; b: 3 - 1, 1 - 3.
_RLOO = HandAnswer(batch=_FIVE_ROWS, advantages=_per_row(0, 2, -1.5, -2, 1.5))

# gamma .5. First row, tokens 0 and 2: G = 0 + .5 * 1 and 1; second row: .5. Mean 2/3, deviations -1/6, 1/3, -1/6, so
# variance (1/36 + 1/9 + 1/36) / 2 = 1/12, and the deviations times sqrt(12) are -.57735, 1.15470, -.57735.
_REINFORCE_PLUS_PLUS = HandAnswer(
    batch=literal_batch([[1, 0, 1], [1, 0, 0]], rewards=[[0, 0, 1], [0.5, 0, 0]]),
    settings={"gamma": 0.5},
    advantages=[[-0.5773502692, 0, 1.1547005384], [-0.5773502692, 0, 0]],
    returns=[[0.5, 0, 1], [0.5, 0, 0]],
    tolerance=2e-7,
)

# Deviations from the means a: 0, -1, 1; b: 1, -1, on rows of 2, 2, 3, 1, 2 tokens (a b a b a): the ten tokens sum to
# 0 + 2 - 3 - 1 + 2 = 0 and their squares to 8, so the variance is 8/9; 1 / sqrt(8/9) = 1.06066.
_REINFORCE_PLUS_PLUS_BASELINE = HandAnswer(
    batch=_FIVE_ROWS, advantages=_per_row(0, 1.0606601718, -1.0606601718, -1.0606601718, 1.0606601718)
)

# First row: G = 1.5 and 1, b = .25. Second row: G = 2 and 2, b = 3.
_REMAX = HandAnswer(
    batch=literal_batch([[1, 0, 1], [1, 1, 0]], rewards=[[0.5, 0, 1], [0, 2, 0]], reward_baselines=[0.25, 3]),
    advantages=[[1.25, 0, 0.75], [-1, -1, 0]],
    returns=[[1.5, 0, 1], [2, 2, 0]],
)

# a, of lengths 2, 3, 2: baseline (2 * 1 + 3 * 0 + 2 * 2) / 7 = 6/7. b, of lengths 2, 1: (2 * 3 + 1 * 1) / 3 = 7/3.
_OPO = HandAnswer(batch=_FIVE_ROWS, advantages=_per_row(1 / 7, 2 / 3, -6 / 7, -4 / 3, 8 / 7))

# Four of the five scores are not 0: alpha = 5/4, times the deviations from the means of the groups.
_GPG = HandAnswer(batch=_FIVE_ROWS, advantages=_per_row(0, 1.25, -1.25, -1.25, 1.25))

# Weights of the baseline: row 0 has pi = .5 and sum pi^2 = .5, so 1 - 1 + .5 = .5 a token, times w^2 = 4, 1, 1: W = 2, 2.5,
# 3. Row 1 has pi = .25 and sum pi^2 = .5: 1 - .5 + .5 = 1 a token, w = 1: W = 1, 2. G = 1, 1, 1 and .5, 0.
# B_0 = (1 * 2 + .5 * 1) / 3 = 5/6; B_1 = (1 * 2.5 + 0 * 2) / 4.5 = 5/9; B_2 = 0, since row 0 is alone there.
_OPTIMAL_TOKEN_BASELINE = HandAnswer(
    batch=literal_batch(
        [[1, 1, 1], [1, 1, 0]],
        rewards=[[0, 0, 1], [0.5, 0, 0]],
        old_log_probs=[[math.log(0.5)] * 3, [math.log(0.25)] * 3],
        sum_pi_squared=[[0.5] * 3] * 2,
        weights=[[2, 1, 1], [1, 1, 1]],
    ),
    advantages=[[1 / 6, 4 / 9, 1], [-1 / 3, -5 / 9, 0]],
    returns=[[1, 1, 1], [0.5, 0, 0]],
)
# The same rows, with a tool token in the middle of row 0: on the clock of the sampled tokens nothing is different.
_TIR_OPTIMAL_TOKEN_BASELINE = HandAnswer(
    batch=literal_batch(
        [[1, 0, 1, 1], [1, 1, 0, 0]],
        rewards=[[0, 0, 0, 1], [0.5, 0, 0, 0]],
        old_log_probs=[[math.log(0.5)] * 4, [math.log(0.25)] * 4],
        sum_pi_squared=[[0.5] * 4] * 2,
        weights=[[2, 7, 1, 1], [1, 1, 1, 1]],
    ),
    advantages=[[1 / 6, 0, 4 / 9, 1], [-1 / 3, -5 / 9, 0, 0]],
    returns=[[1, 0, 1, 1], [0.5, 0, 0, 0]],
)

# Without standard deviations. Component 0, deviations a: 0, -1, 1; b: 1, -1. Component 1, a: 0, 0, 3 deviate by -1, -1, 2;
# b: equal, 0. With weights 1 and .5: a: -.5, -1.5, 2; b: 1, -1. Rows of 2, 2, 3, 1, 2 tokens (a b a b a) sum to
# -1 + 2 - 4.5 - 1 + 4 = -.5: mean -.05. Squares: .5 + 2 + 6.75 + 1 + 8 = 18.25, less 10 * .05^2 = 18.225; / 9 = 2.025.
# So (-.5, 1, -1.5, -1, 2) + .05, over sqrt(2.025) = 1.423025.
_GDPO = HandAnswer(
    batch=_FIVE_ROWS,
    settings={"norm_adv_by_std_in_grpo": False, "gdpo_reward_weights": [1.0, 0.5]},
    advantages=_per_row(-0.3162277660, 0.7378647874, -1.0189561349, -0.6675919505, 1.4405931563),
)

HAND_ANSWERS: dict[str, tuple[HandAnswer, ...]] = {
    "gae": (_GAE,),
    "grpo": (_GRPO,),
    "grpo_vectorized": (_GRPO,),
    "grpo_passk": (_PASSK,),
    "rloo": (_RLOO,),
    "rloo_vectorized": (_RLOO,),
    "reinforce_plus_plus": (_REINFORCE_PLUS_PLUS,),
    "reinforce_plus_plus_baseline": (_REINFORCE_PLUS_PLUS_BASELINE,),
    "remax": (_REMAX,),
    "opo": (_OPO,),
    "gpg": (_GPG,),
    "optimal_token_baseline": (_OPTIMAL_TOKEN_BASELINE,),
    "tir_optimal_token_baseline": (_TIR_OPTIMAL_TOKEN_BASELINE,),
    "gdpo": (_GDPO,),
}
