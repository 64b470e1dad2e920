"""Conformance of the corrections of the rollout: importance weights and every rule of rejection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.config.rejection import RULES
from burnish.conformance.correction import checks
from burnish.conformance.correction.algorithm import Correction
from burnish.conformance.correction.answers import REJECTIONS, WEIGHTS

__all__ = ["Correction", "correction_checks", "corrections"]

# Bounds that reject some of a random batch, for every level.
_BOUNDS: dict[str, tuple[Any, Any]] = {"k1": ("0.5_1.8", 1.5), "k2": (0.2, 0.05), "k3": (0.2, 0.05)}


def corrections() -> list[Correction]:
    """Both kinds of weights, with and without normalisation and rejection beside it, and every rule of rejection."""
    return [*(_weights(level) for level in WEIGHTS), *(_rejection(rule) for rule in RULES)]


def _weights(level: str) -> Correction:
    settings = {"rollout_is": level, "rollout_is_threshold": 2.0}
    normalized = {**settings, "rollout_is_batch_normalize": True}
    beside = {"rollout_rs": "token_k1,seq_mean_k2", "rollout_rs_threshold": "0.4_2.5,0.6"}
    return Correction(
        name=f"rollout_is={level}",
        settings=settings,
        hand=WEIGHTS[level],
        other_settings=(normalized, {**normalized, **beside}, {**settings, "rollout_is_threshold": "0.7_1.6"}),
    )


def _rejection(rule: str) -> Correction:
    first, second = _BOUNDS[rule.rpartition("_")[2]]
    settings = {"rollout_rs": rule, "rollout_rs_threshold": first}
    return Correction(
        name=f"rollout_rs={rule}",
        settings=settings,
        hand=REJECTIONS.get(rule, ()),
        other_settings=({**settings, "rollout_rs_threshold": second},),
    )


def correction_checks(correction: Correction) -> dict[str, Callable[[Any], None]]:
    """The checks that say something about ``correction``, by column."""
    return {
        **({"hand answer": checks.hand_answer} if correction.hand else {}),
        "naive loop": checks.naive_loop,
        "padding": checks.padding,
        "row order": checks.row_order,
        "fp32": checks.fp32,
        "bf16": checks.bf16,
        "extremes and NaN": checks.extremes,
        "hyper-parameters": checks.hyper_parameters,
    }
