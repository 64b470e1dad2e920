"""Importance weights of the rollout and rejection, as loops; log r = log-prob of the trainer - log-prob of the rollout.

The settings are the keys of ``algorithm.rollout_correction``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from burnish.conformance.references.loops import Matrix, Row, clamp, kept, mean

CORRECTION_SETTINGS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}


def _log_ratios(log_prob: Matrix, rollout_log_prob: Matrix, mask: Matrix) -> list[Row]:
    """Of the tokens in the mask, row by row."""
    return [
        [clamp(log_prob[i][t] - rollout_log_prob[i][t], -20.0, 20.0) for t in kept(row)] for i, row in enumerate(mask)
    ]


def importance_weights(
    log_prob: Matrix, rollout_log_prob: Matrix, mask: Matrix, settings: Mapping[str, Any]
) -> Matrix | None:
    """min(r, threshold) per token, or that of the whole row on each of its tokens; 1 outside the mask. Of two bounds, as
    "0.5_2.0", r where it lies between them, else 0.

    Normalised weights are divided by their mean over the tokens that no rule rejects.
    """
    if settings["rollout_is"] is None:
        return None
    lower, _, upper = str(settings["rollout_is_threshold"]).rpartition("_")
    ratios = _log_ratios(log_prob, rollout_log_prob, mask)
    weights = [[1.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        if not ratios[i]:
            continue
        if settings["rollout_is"] == "sequence":
            of_row = _bounded(math.exp(clamp(sum(ratios[i]), -20.0, 20.0)), lower, float(upper))
            of_tokens = [of_row] * len(ratios[i])
        else:
            of_tokens = [_bounded(math.exp(ratio), lower, float(upper)) for ratio in ratios[i]]
        for t, weight in zip(kept(row), of_tokens, strict=True):
            weights[i][t] = weight
    if settings["rollout_is_batch_normalize"]:
        left = accepted(log_prob, rollout_log_prob, mask, settings)
        scale = mean([weights[i][t] for i, row in enumerate(left) for t in kept(row)])
        weights = [
            [weight / scale if inside else weight for weight, inside in zip(w, row, strict=True)]
            for w, row in zip(weights, mask, strict=True)
        ]
    return weights


def _bounded(ratio: float, lower: str, upper: float) -> float:
    if not lower:
        return min(ratio, upper)
    return ratio if float(lower) <= ratio <= upper else 0.0


def accepted(log_prob: Matrix, rollout_log_prob: Matrix, mask: Matrix, settings: Mapping[str, Any]) -> Matrix:
    """The mask without the tokens and rows that a rule of ``rollout_rs`` rejects."""
    result = [list(row) for row in mask]
    if settings["rollout_rs"] is None:
        return result
    rules = [rule.strip() for rule in settings["rollout_rs"].split(",")]
    thresholds = [text.strip() for text in str(settings["rollout_rs_threshold"]).split(",")]
    if len(thresholds) == 1:
        thresholds = thresholds * len(rules)
    ratios = _log_ratios(log_prob, rollout_log_prob, mask)
    for rule, threshold in zip(rules, thresholds, strict=True):
        level, _, estimator = rule.rpartition("_")
        for i, row in enumerate(mask):
            tokens = kept(row)
            if not tokens:
                continue
            amounts = [_amount(ratio, estimator) for ratio in ratios[i]]
            verdicts = [_accepts(amount, estimator, threshold) for amount in amounts]
            if level == "seq_sum":
                verdicts = [_accepts(sum(amounts), estimator, threshold)] * len(tokens)
            elif level == "seq_mean":
                verdicts = [_accepts(mean(amounts), estimator, threshold)] * len(tokens)
            elif level == "seq_max":
                verdicts = [all(verdicts)] * len(tokens)
            for t, verdict in zip(tokens, verdicts, strict=True):
                result[i][t] = result[i][t] and verdict
    return result


def _amount(log_ratio: float, estimator: str) -> float:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return math.exp(log_ratio) - 1 - log_ratio


def _accepts(amount: float, estimator: str, threshold: str) -> bool:
    """k1: lower <= r <= upper, where a single v means 1/v to v; k2 and k3: at most the threshold."""
    if estimator != "k1":
        return amount <= float(threshold)
    lower, _, upper = threshold.partition("_")
    bounds = (float(lower), float(upper)) if upper else (1 / float(lower), float(lower))
    return math.log(min(bounds)) <= -amount <= math.log(max(bounds))
