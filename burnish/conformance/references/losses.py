"""The losses as naive loops, written from their definitions in docs/algorithms.md.

A loss is ``(inputs, settings) -> float``. Inputs of a policy loss, [row][token]: ``log_prob``, ``old_log_prob``, ``advantages``,
``response_mask``, ``rollout_is_weights`` or None, ``noise`` where tokens are chosen at random, and ``frozen_log_prob``:
the same numbers as ``log_prob``, which the loss reads where no gradient passes. So the derivative of the loss is the limit
of differences in ``log_prob`` with ``frozen_log_prob`` held. Settings: those of ``LOSS_SETTINGS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from burnish.conformance.references.aggregation import aggregate
from burnish.conformance.references.correction import CORRECTION_SETTINGS, accepted, importance_weights
from burnish.conformance.references.kl import KL_REFERENCES, k2
from burnish.conformance.references.loops import Matrix, clamp, kept, masked_mean, mean, token_by_token

Inputs = Mapping[str, Any]
Settings = Mapping[str, Any]
LossReference = Callable[[Inputs, Settings], float]

LOSS_SETTINGS: dict[str, Any] = {
    "loss_agg_mode": "token-mean",
    "loss_scale_factor": 8.0,
    "clip_ratio": 0.2,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.0002,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.0002,
    "ppo_kl_coef": 0.1,
    "dro_beta": 0.1,
    "cliprange_value": 0.5,
    "rollout_correction": CORRECTION_SETTINGS,
}


def _offsets(settings: Settings) -> tuple[float, float]:
    low, high = settings["clip_ratio_low"], settings["clip_ratio_high"]
    return (
        settings["clip_ratio"] if low is None else low,
        settings["clip_ratio"] if high is None else high,
    )


def _ratio(log_prob: float, old_log_prob: float) -> float:
    return math.exp(clamp(log_prob - old_log_prob, -20.0, 20.0))


def _aggregated(losses: Matrix, inputs: Inputs, settings: Settings, mode: str | None = None) -> float:
    """Weighted by the rollout's importance weights and aggregated."""
    weights = inputs["rollout_is_weights"]
    if weights is not None:
        losses = token_by_token(lambda loss, weight: loss * weight, losses, weights)
    mode = settings["loss_agg_mode"] if mode is None else mode
    return aggregate(losses, inputs["response_mask"], mode, settings["loss_scale_factor"])


def _each_token(inputs: Inputs, loss: Callable[..., float]) -> Matrix:
    """``loss(log_prob, frozen_log_prob, old_log_prob, advantage)`` of every token in the mask, 0 elsewhere."""
    names = ("response_mask", "log_prob", "frozen_log_prob", "old_log_prob", "advantages")
    return token_by_token(lambda inside, *entries: loss(*entries) if inside else 0.0, *(inputs[name] for name in names))


def _clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high))


def vanilla(inputs: Inputs, settings: Settings) -> float:
    """PPO's clipped loss, bounded by -A c where A < 0."""
    low, high = _offsets(settings)

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        clipped = _clipped(_ratio(new, old), advantage, low, high)
        return min(clipped, -advantage * settings["clip_ratio_c"]) if advantage < 0 else clipped

    return _aggregated(_each_token(inputs, loss), inputs, settings)


def gspo(inputs: Inputs, settings: Settings) -> float:
    """PPO's clip on the ratio of the sequence, whose gradient goes to each token's log-prob."""
    low, high = _offsets(settings)
    losses = []
    for i, mask in enumerate(inputs["response_mask"]):
        tokens = kept(mask)
        row = [0.0] * len(mask)
        new, frozen, old = (inputs[name][i] for name in ("log_prob", "frozen_log_prob", "old_log_prob"))
        for t in tokens:
            of_sequence = masked_mean([frozen[j] - old[j] for j in tokens])
            ratio = math.exp(min(new[t] - frozen[t] + of_sequence, 10.0))
            row[t] = _clipped(ratio, inputs["advantages"][i][t], low, high)
        losses.append(row)
    return _aggregated(losses, inputs, settings, "seq-mean-token-mean")


def sapo(inputs: Inputs, settings: Settings) -> float:
    """A smooth gate instead of the clip."""

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        tau = settings["tau_pos"] if advantage > 0 else settings["tau_neg"]
        x = tau * (_ratio(new, old) - 1)
        return -advantage / (1 + math.exp(-x)) * 4 / tau

    return _aggregated(_each_token(inputs, loss), inputs, settings, "seq-mean-token-mean")


def gpg(inputs: Inputs, settings: Settings) -> float:
    """-log_prob A."""
    losses = _each_token(inputs, lambda new, frozen, old, advantage: -new * advantage)
    return _aggregated(losses, inputs, settings)


def covariances(inputs: Inputs) -> list[tuple[float, int, int]]:
    """(covariance, row, token) of the tokens in the mask."""
    places = [(i, t) for i, row in enumerate(inputs["response_mask"]) for t in kept(row)]
    advantage_mean = mean([inputs["advantages"][i][t] for i, t in places])
    log_prob_mean = mean([inputs["frozen_log_prob"][i][t] for i, t in places])
    return [
        (
            (inputs["advantages"][i][t] - advantage_mean) * (inputs["frozen_log_prob"][i][t] - log_prob_mean),
            i,
            t,
        )
        for i, t in places
    ]


def clip_cov(inputs: Inputs, settings: Settings) -> float:
    """PPO's clip; a few of the unclipped tokens of high covariance, those of the smallest noise, weigh nothing."""
    low, high = _offsets(settings)
    losses = _each_token(inputs, lambda new, frozen, old, a: _clipped(_ratio(new, old), a, low, high))
    of_tokens = covariances(inputs)
    eligible = []
    for covariance, i, t in of_tokens:
        ratio = _ratio(inputs["frozen_log_prob"][i][t], inputs["old_log_prob"][i][t])
        advantage = inputs["advantages"][i][t]
        is_clipped = -advantage * clamp(ratio, 1 - low, 1 + high) > -advantage * ratio
        if not is_clipped and settings["clip_cov_lb"] < covariance < settings["clip_cov_ub"]:
            eligible.append((inputs["noise"][i][t], i, t))
    count = max(1, int(settings["clip_cov_ratio"] * len(of_tokens)))
    for _, i, t in sorted(eligible)[:count]:
        losses[i][t] = 0.0
    return _aggregated(losses, inputs, settings)


def kl_cov(inputs: Inputs, settings: Settings) -> float:
    """-A rho; the tokens of the highest covariance also pay for their distance from the old policy."""
    losses = _each_token(inputs, lambda new, frozen, old, advantage: -advantage * _ratio(new, old))
    # Of equal covariances those of the smallest noise come first.
    of_tokens = sorted(covariances(inputs), key=lambda token: (-token[0], inputs["noise"][token[1]][token[2]]))
    count = max(1, int(settings["kl_cov_ratio"] * len(of_tokens)))
    for _, i, t in of_tokens[:count]:
        losses[i][t] += settings["ppo_kl_coef"] * abs(inputs["log_prob"][i][t] - inputs["old_log_prob"][i][t])
    return _aggregated(losses, inputs, settings)


def geo_mean(inputs: Inputs, settings: Settings) -> float:
    """One ratio per row, the geometric mean of its tokens' one-sidedly clipped ratios; mean over the rows."""
    low, high = _offsets(settings)
    rows = []
    for i, mask in enumerate(inputs["response_mask"]):
        tokens = kept(mask)
        if not tokens:
            continue
        logs = []
        for t in tokens:
            difference = clamp(inputs["log_prob"][i][t] - inputs["old_log_prob"][i][t], -20.0, 20.0)
            advantage = inputs["advantages"][i][t]
            if advantage > 0:
                difference = min(difference, high)
            elif advantage < 0:
                difference = max(difference, -low)
            logs.append(difference if advantage != 0 else 0.0)
        loss = -masked_mean([inputs["advantages"][i][t] for t in tokens]) * math.exp(masked_mean(logs))
        weights = inputs["rollout_is_weights"]
        if weights is not None:
            loss *= math.exp(masked_mean([math.log(weights[i][t]) for t in tokens]))
        rows.append(loss)
    return mean(rows)


def cispo(inputs: Inputs, settings: Settings) -> float:
    """-clipped ratio A log_prob, without a gradient through the ratio."""
    low, high = _offsets(settings)

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        return -clamp(_ratio(frozen, old), 1 - low, 1 + high) * advantage * new

    return _aggregated(_each_token(inputs, loss), inputs, settings)


def dppo_tv(inputs: Inputs, settings: Settings) -> float:
    """Tokens inside a trust region of the total variation; the ratio, at most c, weighs them."""
    low, high = _offsets(settings)

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        change = math.exp(frozen) - math.exp(old)
        inside = change <= high if advantage > 0 else change >= -low
        return -advantage * min(_ratio(frozen, old), settings["clip_ratio_c"]) * new if inside else 0.0

    return _aggregated(_each_token(inputs, loss), inputs, settings)


def dppo_kl(inputs: Inputs, settings: Settings) -> float:
    """Tokens inside a trust region of the KL between sampled and not sampled; the ratio, at most c, weighs them."""
    low, high = _offsets(settings)

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        p, p_old = math.exp(frozen), math.exp(old)
        kl = p_old * (old - frozen) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
        inside = kl <= high or p <= p_old if advantage > 0 else kl <= low or p >= p_old
        return -advantage * min(_ratio(frozen, old), settings["clip_ratio_c"]) * new if inside else 0.0

    return _aggregated(_each_token(inputs, loss), inputs, settings)


def dro(inputs: Inputs, settings: Settings) -> float:
    """-(log_prob A - beta / 2 D^2)."""
    beta = settings["dro_beta"]

    def loss(new: float, frozen: float, old: float, advantage: float) -> float:
        return -(new * advantage - 0.5 * beta * (new - old) ** 2)

    return _aggregated(_each_token(inputs, loss), inputs, settings)


def bypass_mode(inputs: Inputs, settings: Settings) -> float:
    """The old log-probs are the rollout's; weights and rejection from the policy as it is, without gradient."""
    correction = {**CORRECTION_SETTINGS, **settings["rollout_correction"]}
    compared = (inputs["frozen_log_prob"], inputs["old_log_prob"], inputs["response_mask"], correction)
    thinned = {**inputs, "response_mask": accepted(*compared), "rollout_is_weights": None}
    if correction["loss_type"] == "ppo_clip":
        return vanilla(thinned, settings)
    return gpg({**thinned, "rollout_is_weights": importance_weights(*compared)}, settings)


def kl_loss(inputs: Inputs, settings: Settings, form: str) -> float:
    """The aggregated KL estimate; a form with `+` has the value of the form without and the gradient of k2."""
    estimate = KL_REFERENCES[form]

    def token(new: float, frozen: float, ref: float) -> float:
        if form.endswith("+"):
            return k2(new - ref) - k2(frozen - ref) + estimate(frozen - ref)
        return estimate(new - ref)

    losses = token_by_token(token, inputs["log_prob"], inputs["frozen_log_prob"], inputs["ref_log_prob"])
    return aggregate(losses, inputs["response_mask"], settings["loss_agg_mode"], settings["loss_scale_factor"])


def value_loss(inputs: Inputs, settings: Settings) -> float:
    """The larger of the squared errors of v and of v clipped to v_old +- cliprange, halved."""

    def token(value: float, target: float, old: float) -> float:
        clipped = clamp(value, old - settings["cliprange_value"], old + settings["cliprange_value"])
        return 0.5 * max((value - target) ** 2, (clipped - target) ** 2)

    losses = token_by_token(token, inputs["vpreds"], inputs["returns"], inputs["values"])
    return aggregate(losses, inputs["response_mask"], settings["loss_agg_mode"], settings["loss_scale_factor"])
