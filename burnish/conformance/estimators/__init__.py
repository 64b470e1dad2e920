"""Conformance of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.config.names import GROUP_ADV_ESTIMATORS
from burnish.conformance.cases import hyper_parameters
from burnish.conformance.estimators import checks
from burnish.conformance.estimators.algorithm import Estimator
from burnish.conformance.estimators.answers import HAND_ANSWERS
from burnish.conformance.estimators.cases import SETTING_CASES
from burnish.conformance.references import ESTIMATOR_REFERENCES, EstimatorReference
from burnish.core_algos.estimators import ADV_ESTIMATORS, get_adv_estimator_fn

__all__ = ["Estimator", "built_in_estimators", "estimator_checks", "own_estimator"]


def built_in_estimators() -> list[Estimator]:
    """Every registered estimator."""
    return [
        Estimator(
            name=str(name),
            function=get_adv_estimator_fn(name),
            reference=ESTIMATOR_REFERENCES.get(name),
            hand=HAND_ANSWERS.get(name, ()),
            cases=SETTING_CASES.get(name, ()),
            zero_for_equal_rewards=name in GROUP_ADV_ESTIMATORS,
        )
        for name in ADV_ESTIMATORS
    ]


def own_estimator(
    name: str, reference: EstimatorReference | None = None, custom: Mapping[str, Any] | None = None
) -> Estimator:
    """The estimator at ``package.module:function``, with its ``algorithm.custom``.

    Raises:
        ConfigError: it cannot be loaded.
    """
    return Estimator(
        name=name,
        function=get_adv_estimator_fn(name),
        reference=reference,
        masks_rewards=False,
        custom=custom or {},
    )


def estimator_checks(estimator: Estimator) -> dict[str, Callable[[Any], None]]:
    """The checks that say something about ``estimator``, by column."""
    has_settings, reads_groups = bool(estimator.cases), "index" in estimator.parameters
    built_in = estimator.name in ADV_ESTIMATORS
    return {
        **({"hand answer": checks.hand_answer} if estimator.hand else {}),
        **({"naive loop": checks.naive_loop} if estimator.reference else {}),
        "padding": checks.padding,
        "row order": checks.row_order,
        **({"group interleaving": checks.group_interleaving} if reads_groups else {}),
        "fp32": checks.fp32,
        # Rewards, values and log-probs are float32 in the trainer: one's own estimator need not know of anything narrower.
        **({"bf16": checks.bf16} if built_in else {}),
        "extremes and NaN": checks.extremes,
        **({"hyper-parameters": hyper_parameters} if has_settings else {}),
    }
