"""Losses and gradients worked out on paper, one term after the other: the answers are numbers, the working is in the comments.

D = log_prob - old_log_prob, rho = exp(D) = e^D.
"""

from __future__ import annotations

import math

from burnish.conformance.batches import literal_batch
from burnish.conformance.losses.term import HandAnswer

_LN2 = math.log(2)

# Three tokens. D = .5, A = .5: rho = 1.6487 is clipped to 1.2: L = -.6, no gradient.
# D = 0, A = -2: L = 2, gradient -A rho = 2.  D = 2, A = -1: rho = 7.39, and -A rho is bounded by -A c = 3, no gradient.
# Mean of the three: 4.4 / 3.
_VANILLA = HandAnswer(
    batch=literal_batch(
        [[1, 1, 1]], old_log_probs=[[-2, -1, -3]], log_probs=[[-1.5, -1, -1]], advantages=[[0.5, -2, -1]]
    ),
    loss=4.4 / 3,
    gradient=[[0, 2 / 3, 0]],
)

# First row: D = .1, .3, so s = .2 and rho = e^.2 = 1.2214 is clipped to 1.2: -1.2, no gradient. Second row: D = -.1, .3, so
# s = .1: -e^.1 = -1.105171 on both tokens, each with the gradient -e^.1 / (2 tokens * 2 rows). Mean of the two rows.
_GSPO = HandAnswer(
    batch=literal_batch(
        [[1, 1], [1, 1]],
        old_log_probs=[[-1, -1], [-1, -1]],
        log_probs=[[-0.9, -0.7], [-1.1, -0.7]],
        advantages=[[1, 1], [1, 1]],
    ),
    settings={"clip_ratio": 0.2},
    loss=-1.1525854590,
    gradient=[[0, 0], [-0.2762927295, -0.2762927295]],
)

# D = 0, A = -1: sigmoid(0) 4 / 1.05 = 1.904762; its slope -A 4 sigmoid (1 - sigmoid) rho = 1.
# D = ln 2, A = 1: -sigmoid(1) 4 = -2.924234; slope -4 * .731059 * .268941 * 2 = -1.572895. One row: half of each.
_SAPO = HandAnswer(
    batch=literal_batch([[1, 1]], old_log_probs=[[-1, -1 - _LN2]], log_probs=[[-1, -1]], advantages=[[-1, 1]]),
    loss=-0.5097362049,
    gradient=[[0.5, -0.7864477330]],
)

# -log_prob A = 3 and -.5, gradients -A; half of each.
_GPG = HandAnswer(
    batch=literal_batch([[1, 1]], log_probs=[[-1.5, -0.5]], advantages=[[2, -1]]), loss=1.25, gradient=[[-1, 0.5]]
)

# On policy, so nothing is clipped. Means of log_prob and A: -2 and 0; covariances 3, 0, 3. In (1, 5) are the first and the
# last; max(1, int(2e-4 * 3)) = 1 of them is left out: the last, whose noise is smaller. L = -3, 0, and 0 instead of 3.
_CLIP_COV = HandAnswer(
    batch=literal_batch(
        [[1, 1, 1]],
        old_log_probs=[[-1, -2, -3]],
        log_probs=[[-1, -2, -3]],
        advantages=[[3, 0, -3]],
        noise=[[0.9, 0.1, 0.2]],
    ),
    settings={"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    loss=-1.0,
    gradient=[[-1, 0, 0]],
)

# Means: -2 and 1/3; covariances 2.67, 0, 2.33: the first token pays .1 * |D| = .05 beside -A rho = -3 e^.5 = -4.946164.
# The others: 0 and 2. Gradients: -3 e^.5 + .1, 0 and 2, over three tokens.
_KL_COV = HandAnswer(
    batch=literal_batch([[1, 1, 1]], old_log_probs=[[-1.5, -2, -3]], log_probs=[[-1, -2, -3]], advantages=[[3, 0, -2]]),
    settings={"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
    loss=-0.9653879374,
    gradient=[[-1.6153879374, 0, 2 / 3]],
)

# A = 2: D = .5, .1 become .2, .1, mean .15: -2 e^.15 = -2.323668; half of it is the second token's gradient, the first is
# clipped. A = -1: D = -.5, -.1 become -.2, -.1: e^-.15 = .860708, likewise. Mean of the two rows.
_GEO_MEAN_BATCH = {
    "old_log_probs": [[-1.5, -1.1], [-1, -1]],
    "log_probs": [[-1, -1], [-1.5, -1.1]],
    "advantages": [[2, 2], [-1, -1]],
}
_GEO_MEAN = HandAnswer(
    batch=literal_batch([[1, 1], [1, 1]], **_GEO_MEAN_BATCH),
    loss=-0.7314802545,
    gradient=[[0, -0.5809171214], [0, 0.2151769941]],
)
# Weights 4 and 1 count as their geometric mean, 2, for the whole row: twice the first row above.
_GEO_MEAN_WEIGHTED = HandAnswer(
    batch=literal_batch([[1, 1], [1, 1]], weights=[[4, 1], [1, 1]], **_GEO_MEAN_BATCH),
    settings={"weighted": True},
    loss=-1.8933144972,
    gradient=[[0, -1.1618342427], [0, 0.2151769941]],
)

# D = .5, A = 2: the ratio 1.6487 counts as 1.2: -1.2 * 2 * -1 = 2.4, gradient -2.4.
# D = -.5, A = -1: .6065 counts as .8: -.8 * -1 * -2 = -1.6, gradient .8. Half of each.
_CISPO = HandAnswer(
    batch=literal_batch([[1, 1]], old_log_probs=[[-1.5, -1.5]], log_probs=[[-1, -2]], advantages=[[2, -1]]),
    loss=0.4,
    gradient=[[-1.2, 0.4]],
)

# p from .25 to .5 with A = 1: .25 more than .2 allow: 0. From .5 to .6 with A = 2: rho = 1.2, -2.4 ln .6 = 1.225982, gradient
# -2.4. From .1 to .5 with A = -1, away from falling: rho = 5 counts as 3: 3 ln .5 = -2.079442, gradient 3.
_DPPO_TV = HandAnswer(
    batch=literal_batch(
        [[1, 1, 1]],
        old_log_probs=[[math.log(0.25), math.log(0.5), math.log(0.1)]],
        log_probs=[[math.log(0.5), math.log(0.6), math.log(0.5)]],
        advantages=[[1, 2, -1]],
    ),
    loss=-0.2844866815,
    gradient=[[0, -0.8, 1]],
)

# p from .25 to .5: K = .25 ln .5 + .75 ln 1.5 = .1308 <= .2: rho = 2, -2 ln .5 = 1.386294, gradient -2.
# From .1 to .5 with A = 1: K = .1 ln .2 + .9 ln 1.8 = .3681 > .2: 0. The same with A = -1: p has risen, so it counts, with
# rho = 5 as 3: 3 ln .5 = -2.079442, gradient 3.
_DPPO_KL = HandAnswer(
    batch=literal_batch(
        [[1, 1, 1]],
        old_log_probs=[[math.log(0.25), math.log(0.1), math.log(0.1)]],
        log_probs=[[math.log(0.5)] * 3],
        advantages=[[1, 1, -1]],
    ),
    loss=-0.2310490602,
    gradient=[[-2 / 3, 0, 1]],
)

# beta = .1. D = .5, A = 2: -(-2 - .05 * .25) = 2.0125, gradient -(2 - .05) = -1.95.
# D = -1, A = -1: -(2 - .05) = -1.95, gradient -(-1 + .1) = .9. Half of each.
_DRO = HandAnswer(
    batch=literal_batch([[1, 1]], old_log_probs=[[-1.5, -1]], log_probs=[[-1, -2]], advantages=[[2, -1]]),
    loss=0.03125,
    gradient=[[-0.975, 0.45]],
)

# The old log-probs are the rollout's. ppo_clip: D = .5, A = 1 is clipped to 1.2: -1.2; D = 0, A = -1: 1. No other weights.
_BYPASS_PPO_CLIP = HandAnswer(
    batch=literal_batch([[1, 1]], old_log_probs=[[-1.5, -1]], log_probs=[[-1, -1]], advantages=[[1, -1]]),
    settings={"rollout_correction": {"loss_type": "ppo_clip", "rollout_is": "token"}},
    loss=-0.1,
    gradient=[[0, 0.5]],
)
# reinforce: r = e^.5 = 1.648721: -1.648721 * 1 * -1; r = 4 counts as 2: -2 * -1 * -.5 = -1. Gradients -w A over two tokens.
_BYPASS_BATCH = literal_batch(
    [[1, 1]], old_log_probs=[[-1.5, -0.5 - 2 * _LN2]], log_probs=[[-1, -0.5]], advantages=[[1, -1]]
)
_BYPASS_REINFORCE = HandAnswer(
    batch=_BYPASS_BATCH,
    settings={"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}},
    loss=0.3243606354,
    gradient=[[-0.8243606354, 1]],
)
# r = 4 is rejected, and leaves the denominator too: one token.
_BYPASS_REJECTION = HandAnswer(
    batch=_BYPASS_BATCH,
    settings={
        "rollout_correction": {
            "loss_type": "reinforce",
            "rollout_is": "token",
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.5_2.0",
        }
    },
    loss=1.6487212707,
    gradient=[[-1.6487212707, 0]],
)

POLICY_LOSSES: dict[str, tuple[HandAnswer, ...]] = {
    "vanilla": (_VANILLA,),
    "gspo": (_GSPO,),
    "sapo": (_SAPO,),
    "gpg": (_GPG,),
    "clip_cov": (_CLIP_COV,),
    "kl_cov": (_KL_COV,),
    "geo_mean": (_GEO_MEAN, _GEO_MEAN_WEIGHTED),
    "cispo": (_CISPO,),
    "dppo_tv": (_DPPO_TV,),
    "dppo_kl": (_DPPO_KL,),
    "dro": (_DRO,),
    "bypass_mode": (_BYPASS_PPO_CLIP, _BYPASS_REINFORCE, _BYPASS_REJECTION),
}


def _kl(loss: float, gradient: list[float]) -> tuple[HandAnswer, ...]:
    """d = .5 and d = -1, mean of the two."""
    batch = literal_batch([[1, 1]], log_probs=[[-1, -2]], ref_log_probs=[[-1.5, -1]])
    return (HandAnswer(batch=batch, loss=loss, gradient=[gradient]),)


# d: .5 and -1. abs(d): .5 and 1. d^2 / 2: .125 and .5, slopes d. exp(-d) + d - 1: .106531 and e - 2 = .718282, slopes
# 1 - exp(-d) = .393469 and -1.718282. With a + the slopes are those of d^2 / 2. Half of each.
_K1, _ABS, _K2, _K3 = -0.25, 0.75, 0.3125, 0.4124062441
_OF_K1, _OF_ABS, _OF_K2, _OF_K3 = [0.5, 0.5], [0.5, -0.5], [0.25, -0.5], [0.1967346701, -0.8591409142]

KL_FORMS: dict[str, tuple[HandAnswer, ...]] = {
    "kl": _kl(_K1, _OF_K1),
    "k1": _kl(_K1, _OF_K1),
    "abs": _kl(_ABS, _OF_ABS),
    "mse": _kl(_K2, _OF_K2),
    "k2": _kl(_K2, _OF_K2),
    "low_var_kl": _kl(_K3, _OF_K3),
    "k3": _kl(_K3, _OF_K3),
    "kl+": _kl(_K1, _OF_K2),
    "k1+": _kl(_K1, _OF_K2),
    "abs+": _kl(_ABS, _OF_K2),
    "mse+": _kl(_K2, _OF_K2),
    "k2+": _kl(_K2, _OF_K2),
    "low_var_kl+": _kl(_K3, _OF_K2),
    "k3+": _kl(_K3, _OF_K2),
}

# v = 1, v_old = 0, R = 2: (1 - 2)^2 = 1, and v clipped to .5: 2.25 is larger: 1.125, no gradient.
# v = .2, v_old = 0, R = 1: .64 both ways: .32, gradient v - R = -.8. Mean of two tokens.
VALUE_LOSS = (
    HandAnswer(
        batch=literal_batch([[1, 1]], vpreds=[[1, 0.2]], values=[[0, 0]], returns=[[2, 1]]),
        loss=0.7225,
        gradient=[[0, -0.4]],
    ),
)


def _aggregated(loss: float, first_row: float, second_row: float) -> tuple[HandAnswer, ...]:
    """Losses 1 and 2 around a tool token, 3, and a row without a token that counts; loss_scale_factor 4."""
    answer = HandAnswer(
        batch=literal_batch([[1, 0, 1], [0, 1, 0], [0, 0, 0]], values=[[1, 9, 2], [9, 3, 9], [9, 9, 9]]),
        settings={"loss_scale_factor": 4.0},
        loss=loss,
        gradient=[[first_row, 0, first_row], [0, second_row, 0], [0, 0, 0]],
    )
    return (answer,)


# token-mean: 6 / 3 tokens. Rows: sums 3 and 3, means 1.5 and 3, sums over 4 twice .75; two rows count.
AGGREGATION_MODES: dict[str, tuple[HandAnswer, ...]] = {
    "token-mean": _aggregated(2, 1 / 3, 1 / 3),
    "seq-mean-token-sum": _aggregated(3, 1 / 2, 1 / 2),
    "seq-mean-token-mean": _aggregated(2.25, 1 / 4, 1 / 2),
    "seq-mean-token-sum-norm": _aggregated(0.75, 1 / 8, 1 / 8),
    "token-sum": _aggregated(6, 1, 1),
}
