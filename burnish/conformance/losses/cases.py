"""What every hyper-parameter of a loss does, as checks that state the value that the formula gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from burnish.conformance.batches import RaggedBatch, literal_batch, loss_batch
from burnish.conformance.cases import SettingCase
from burnish.conformance.comparison import close
from burnish.conformance.losses.term import LossTerm, evaluate
from burnish.core_algos.aggregation import LOSS_AGG_MODES

_LN2 = math.log(2)


def _row(log_probs: Sequence[float], old: Sequence[float], advantages: Sequence[float]) -> RaggedBatch:
    """One row of tokens that all count."""
    return literal_batch(
        [[1] * len(log_probs)], log_probs=[list(log_probs)], old_log_probs=[list(old)], advantages=[list(advantages)]
    )


def _moved(distance: float, advantage: float) -> RaggedBatch:
    """One token whose log-ratio is ``distance``; the log-prob is -1."""
    return _row([-1.0], [-1.0 - distance], [advantage])


def _gives(
    setting: str, batch: RaggedBatch, settings: Mapping[str, Any], gradient: Sequence[float], loss: float | None = None
) -> SettingCase:
    """Under ``settings`` the gradient, and the loss where it is given, have these values."""

    def check(term: LossTerm) -> None:
        got = evaluate(term, batch, **settings)
        words = ", ".join(f"{key}={value}" for key, value in settings.items())
        close(f"With {words} the gradient", got.gradient, [list(gradient)], 1e-7)
        if loss is not None:
            close(f"With {words} the loss", got.loss, loss, 1e-7)

    return SettingCase(setting=setting, check=check)


def _weights_multiply(term: LossTerm) -> None:
    batch = loss_batch(0)
    doubled = replace(batch, weights=torch.full_like(batch.weights, 2.0))
    got, plain = evaluate(term, doubled, weighted=True), evaluate(term, batch)
    close("Weights of 2 double the loss: it", got.loss, 2 * plain.loss, 1e-7)
    close("Weights of 2 double the gradient: it", got.gradient, 2 * plain.gradient, 1e-7)


def _mode_is_fixed(term: LossTerm) -> None:
    losses = [evaluate(term, loss_batch(0), loss_agg_mode=mode).loss for mode in LOSS_AGG_MODES]
    for mode, loss in zip(LOSS_AGG_MODES, losses, strict=True):
        close(f"loss_agg_mode does not count here: with {mode} the loss", loss, losses[0])


_WEIGHTS = SettingCase(setting="rollout_is_weights", check=_weights_multiply)
_FIXED_MODE = SettingCase(setting="loss_agg_mode", check=_mode_is_fixed)

_E = math.e

# D = 1 with A = 1 is clipped at 1 + high, D = -1 with A = -1 at 1 - low; inside the clip the gradient is -A rho.
_PPO_CLIP = (
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 0.28}, [0], -1.28),
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 2.0}, [-_E], -_E),
    _gives("clip_ratio_low", _moved(-1, -1), {"clip_ratio_low": 0.3}, [0], 0.7),
    _gives("clip_ratio_low", _moved(-1, -1), {"clip_ratio_low": 0.7}, [1 / _E], 1 / _E),
    _gives("clip_ratio", _moved(1, 1), {"clip_ratio": 0.1}, [0], -1.1),
    _gives("clip_ratio", _moved(-1, -1), {"clip_ratio": 0.1}, [0], 0.9),
    _gives("clip_ratio", _moved(1, 1), {"clip_ratio": 0.1, "clip_ratio_high": 0.3}, [0], -1.3),
)

# A = -1 and rho = e^2 = 7.389: bounded by c, or not.
_DUAL_CLIP = (
    _gives("clip_ratio_c", _moved(2, -1), {"clip_ratio_c": 3.0}, [0], 3.0),
    _gives("clip_ratio_c", _moved(2, -1), {"clip_ratio_c": 10.0}, [_E**2], _E**2),
)

# rho = 2: -A sigmoid(tau) 4 / tau; with tau = 2 that is 2 * .8807970780, with tau = 4 it is .9820137900.
_SOFT_GATE = (
    _gives("tau_pos", _moved(_LN2, 1), {"tau_pos": 2.0}, [-4 * 0.1049935854 * 2], -2 * 0.8807970780),
    _gives("tau_pos", _moved(_LN2, 1), {"tau_pos": 4.0, "tau_neg": 9.0}, [-4 * 0.0176627062 * 2], -0.9820137900),
    _gives("tau_neg", _moved(_LN2, -1), {"tau_neg": 2.0, "tau_pos": 9.0}, [4 * 0.1049935854 * 2], 2 * 0.8807970780),
)

# On policy; means of log_prob and A: -2 and 1; covariances 3, 0, 3; gradients -A / 3 where a token is not left out.
_COVARIANCE = _row([-1, -2, -3], [-1, -2, -3], [4, 1, -2])
_CLIP_COV = (
    _gives("clip_cov_lb", _COVARIANCE, {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}, [0, -1 / 3, 0]),
    _gives("clip_cov_lb", _COVARIANCE, {"clip_cov_ratio": 1.0, "clip_cov_lb": -1.0, "clip_cov_ub": 5.0}, [0, 0, 0]),
    _gives(
        "clip_cov_ub", _COVARIANCE, {"clip_cov_ratio": 1.0, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0}, [-4 / 3, 0, 2 / 3]
    ),
    _gives(
        "clip_cov_ub",
        _COVARIANCE,
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.0, "clip_cov_ub": 2.0},
        [-4 / 3, -1 / 3, 2 / 3],
    ),
)


def _num_left_out(term: LossTerm) -> None:
    advantages = [3.0, 2.5, 2.0, 1.5, 1.0, -1.0, -1.5, -2.0, -2.5, -3.0]
    log_probs = [-0.1, -0.2, -0.3, -0.4, -0.5, -2.5, -2.6, -2.7, -2.8, -2.9]
    batch = replace(_row(log_probs, log_probs, advantages), noise=torch.arange(10.0)[None] / 10)
    for ratio, count in ((0.0, 1), (0.19, 1), (0.3, 3), (1.0, 10)):
        settings = {"clip_cov_ratio": ratio, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}
        zero = int((evaluate(term, batch, **settings).gradient == 0).sum())
        close(f"Of ten tokens that may be left out, clip_cov_ratio={ratio} leaves out", float(zero), float(count))


# D = .1 everywhere; covariances 3.5, 0, 4: the last token comes first, then the first.
_RANKED = _row([-1, -2, -3.5], [-1.1, -2.1, -3.6], [4, 1, -2])
_RHO = math.exp(0.1)
_KL_COV = (
    _gives(
        "kl_cov_ratio",
        _RANKED,
        {"kl_cov_ratio": 0.0, "ppo_kl_coef": 1.0},
        [-4 * _RHO / 3, -_RHO / 3, (2 * _RHO + 1) / 3],
    ),
    _gives(
        "kl_cov_ratio",
        _RANKED,
        {"kl_cov_ratio": 0.7, "ppo_kl_coef": 1.0},
        [(1 - 4 * _RHO) / 3, -_RHO / 3, (2 * _RHO + 1) / 3],
    ),
    _gives(
        "ppo_kl_coef",
        _RANKED,
        {"kl_cov_ratio": 0.0, "ppo_kl_coef": 2.0},
        [-4 * _RHO / 3, -_RHO / 3, (2 * _RHO + 2) / 3],
    ),
    _gives("ppo_kl_coef", _RANKED, {"kl_cov_ratio": 0.0, "ppo_kl_coef": 0.0}, [-4 * _RHO / 3, -_RHO / 3, 2 * _RHO / 3]),
)

# The offsets bound log-ratios.
_LOG_CLIP = (
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 0.4}, [0], -math.exp(0.4)),
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 2.0}, [-_E], -_E),
    _gives("clip_ratio_low", _moved(-1, -1), {"clip_ratio_low": 0.4}, [0], math.exp(-0.4)),
    _gives("clip_ratio_low", _moved(-1, -1), {"clip_ratio_low": 2.0}, [1 / _E], 1 / _E),
    _gives("clip_ratio", _moved(1, 1), {"clip_ratio": 0.1}, [0], -math.exp(0.1)),
)

# The clipped ratio is the weight of -A log_prob, log_prob = -1.
_WEIGHT_CLIP = (
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 0.28}, [-1.28], 1.28),
    _gives("clip_ratio_high", _moved(1, 1), {"clip_ratio_high": 2.0}, [-_E], _E),
    _gives("clip_ratio_low", _moved(-1, 1), {"clip_ratio_low": 0.3}, [-0.7], 0.7),
    _gives("clip_ratio_low", _moved(-1, 1), {"clip_ratio_low": 1.0}, [-1 / _E], 1 / _E),
    _gives("clip_ratio", _moved(1, 1), {"clip_ratio": 0.1}, [-1.1], 1.1),
)


def _trust_region(narrow: float, wide: float) -> tuple[SettingCase, ...]:
    """p from .5 to .75 with A = 1 and from .5 to .25 with A = -1: outside the narrow region, inside the wide one."""
    rises = _row([math.log(0.75)], [math.log(0.5)], [1])
    falls = _row([math.log(0.25)], [math.log(0.5)], [-1])
    return (
        _gives("clip_ratio_high", rises, {"clip_ratio_high": narrow, "clip_ratio_low": 9.0}, [0], 0.0),
        _gives("clip_ratio_high", rises, {"clip_ratio_high": wide, "clip_ratio_low": 0.0}, [-1.5]),
        _gives("clip_ratio_low", falls, {"clip_ratio_low": narrow, "clip_ratio_high": 9.0}, [0], 0.0),
        _gives("clip_ratio_low", falls, {"clip_ratio_low": wide, "clip_ratio_high": 0.0}, [0.5]),
        _gives("clip_ratio", rises, {"clip_ratio": narrow}, [0], 0.0),
        # p from .1 to .5 with A = -1 is never outside; its ratio 5 counts as at most c.
        _gives("clip_ratio_c", _row([math.log(0.5)], [math.log(0.1)], [-1]), {"clip_ratio_c": 3.0}, [3.0]),
        _gives("clip_ratio_c", _row([math.log(0.5)], [math.log(0.1)], [-1]), {"clip_ratio_c": 20.0}, [5.0]),
    )


# -(A - beta D) with D = .5.
_PULL = (
    _gives("dro_beta", _moved(0.5, 1), {"dro_beta": 0.0}, [-1]),
    _gives("dro_beta", _moved(0.5, 1), {"dro_beta": 0.5}, [-0.75]),
    _gives("dro_beta", _moved(0.5, 1), {"dro_beta": 2.0}, [0]),
)


def _corrected(setting: str, correction: Mapping[str, Any], gradient: Sequence[float]) -> SettingCase:
    """Two tokens of A = 1 whose ratios to the rollout are 2 and 4."""
    batch = _row([-1, -1], [-1 - _LN2, -1 - 2 * _LN2], [1, 1])
    return _gives(setting, batch, {"rollout_correction": {"loss_type": "reinforce", **correction}}, gradient)


_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 10.0}
_BYPASS = (
    _corrected("loss_type", {"loss_type": "ppo_clip"}, [0, 0]),
    _corrected("loss_type", {}, [-1 / 2, -1 / 2]),
    _corrected("rollout_is", _TOKEN, [-2 / 2, -4 / 2]),
    _corrected("rollout_is", {**_TOKEN, "rollout_is": "sequence"}, [-8 / 2, -8 / 2]),
    _corrected("rollout_is_threshold", {"rollout_is": "token", "rollout_is_threshold": 3.0}, [-2 / 2, -3 / 2]),
    _corrected("rollout_is_batch_normalize", {**_TOKEN, "rollout_is_batch_normalize": True}, [-1 / 3, -2 / 3]),
    _corrected("rollout_rs", {**_TOKEN, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.3_3"}, [-2, 0]),
    _corrected("rollout_rs_threshold", {**_TOKEN, "rollout_rs": "token_k1", "rollout_rs_threshold": 5}, [-1, -2]),
)

POLICY_LOSSES: dict[str, tuple[SettingCase, ...]] = {
    "vanilla": (*_PPO_CLIP, *_DUAL_CLIP, _WEIGHTS),
    "gspo": (*_PPO_CLIP, _WEIGHTS, _FIXED_MODE),
    "sapo": (*_SOFT_GATE, _WEIGHTS, _FIXED_MODE),
    "gpg": (_WEIGHTS,),
    "clip_cov": (*_PPO_CLIP, *_CLIP_COV, SettingCase(setting="clip_cov_ratio", check=_num_left_out), _WEIGHTS),
    "kl_cov": (*_KL_COV, _WEIGHTS),
    "geo_mean": (*_LOG_CLIP, _WEIGHTS, _FIXED_MODE),
    "cispo": (*_WEIGHT_CLIP, _WEIGHTS),
    "dppo_tv": (*_trust_region(0.2, 0.3), _WEIGHTS),
    # K = .5 ln(2/3) + .5 ln 2 = .1438 both ways.
    "dppo_kl": (*_trust_region(0.1, 0.2), _WEIGHTS),
    "dro": (*_PULL, _WEIGHTS),
    "bypass_mode": _BYPASS,
}

# v = 1, v_old = 0, R = 2: clipped to .5 the error is 1.5; with room for v it is 1.
_VALUE = literal_batch([[1]], vpreds=[[1]], values=[[0]], returns=[[2]])
VALUE_LOSS = (
    _gives("cliprange_value", _VALUE, {"cliprange_value": 0.5}, [0], 1.125),
    _gives("cliprange_value", _VALUE, {"cliprange_value": 2.0}, [-1], 0.5),
)

_LOSSES = literal_batch([[1, 1]], values=[[1, 3]])
AGGREGATION_MODES: dict[str, tuple[SettingCase, ...]] = {
    "seq-mean-token-sum-norm": (
        _gives("loss_scale_factor", _LOSSES, {"loss_scale_factor": 4.0}, [1 / 4, 1 / 4], 1.0),
        _gives("loss_scale_factor", _LOSSES, {"loss_scale_factor": 8.0}, [1 / 8, 1 / 8], 0.5),
    ),
    "token-mean": (_gives("loss_scale_factor", _LOSSES, {"loss_scale_factor": 4.0}, [1 / 2, 1 / 2], 2.0),),
}
