"""Conformance of the terms of the loss: policy losses, KL forms, the value loss, modes of aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.conformance.cases import hyper_parameters
from burnish.conformance.losses import checks
from burnish.conformance.losses.packing import packing
from burnish.conformance.losses.term import LossTerm
from burnish.conformance.losses.terms import aggregation_modes, kl_forms, policy_loss, policy_losses, value_loss

__all__ = [
    "LossTerm",
    "aggregation_modes",
    "kl_forms",
    "loss_checks",
    "policy_loss",
    "policy_losses",
    "value_loss",
]


def loss_checks(term: LossTerm) -> dict[str, Callable[[Any], None]]:
    """The checks that say something about ``term``, by column."""
    return {
        **({"hand answer": checks.hand_answer} if term.hand else {}),
        **({"naive loop": checks.naive_loop, "gradient": checks.gradient} if term.reference else {}),
        "padding": checks.padding,
        "row order": checks.row_order,
        "micro-batches": checks.micro_batches,
        "ranks": checks.ranks,
        "packing": packing,
        "fp32": checks.fp32,
        "bf16": checks.bf16,
        "extremes and NaN": checks.extremes,
        **({"hyper-parameters": hyper_parameters} if term.cases else {}),
    }
