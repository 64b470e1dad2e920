"""What the checks know of a correction of the rollout: importance weights, or one rule of rejection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.config import RolloutCorrectionConfig
from burnish.conformance.batches import RaggedBatch
from burnish.conformance.references import CORRECTION_SETTINGS, accepted, importance_weights
from burnish.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask

Settings = Mapping[str, Any]
Correct = Callable[[Tensor, Tensor, Tensor, RolloutCorrectionConfig], tuple[Tensor | None, Tensor, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class HandAnswer:
    """Settings, and the weights (1 outside the mask) or the mask that they give for `correction.answers.BATCH`."""

    settings: Settings
    weights: list[list[float]] | None = None
    mask: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A correction as the checks see it.

    Attributes:
        name: ``rollout_is=...`` or ``rollout_rs=...``.
        settings: of ``algorithm.rollout_correction``, so that random batches hold both what it changes and what it leaves.
        function: what computes weights, mask and metrics.
    """

    name: str
    settings: Settings
    hand: tuple[HandAnswer, ...] = ()
    other_settings: tuple[Settings, ...] = field(default_factory=tuple)
    function: Correct = compute_rollout_correction_and_rejection_mask

    kind: str = "rollout correction"

    def __call__(self, batch: RaggedBatch, settings: Settings | None = None) -> tuple[Tensor | None, Tensor]:
        """(weights, mask) of the batch."""
        config = RolloutCorrectionConfig(**(self.settings if settings is None else settings))
        weights, mask, _ = self.function(batch.old_log_probs, batch.rollout_log_probs, batch.mask, config)
        return weights, mask

    def expected(self, batch: RaggedBatch, settings: Settings | None = None) -> tuple[Tensor | None, Tensor]:
        """(weights, mask) of the naive loops; weights are 1 outside the mask there."""
        known = {**CORRECTION_SETTINGS, **(self.settings if settings is None else settings)}
        inputs = (batch.old_log_probs.tolist(), batch.rollout_log_probs.tolist(), batch.mask.tolist(), known)
        weights = importance_weights(*inputs)
        mask = torch.tensor(accepted(*inputs), dtype=torch.bool)
        return None if weights is None else torch.tensor(weights, dtype=torch.float64), mask
