"""Notices a rollout that no longer samples from the policy that is trained."""

import logging
import statistics
from collections.abc import Mapping

logger = logging.getLogger("burnish.trainer")

_METRIC = "training/rollout_probs_diff_mean"
# Steps that show what is usual in this run, and those in a row that must be unusual.
_USUAL, _IN_A_ROW = 5, 3
# Unusual is this many times the usual gap, and at least this much probability more: rounding differs from step to step.
_FACTOR, _MARGIN = 4.0, 0.01


class RolloutGapWatch:
    """Warns when the probabilities of trainer and rollout for the sampled tokens drift apart.

    Both compute the same function of the same weights, so that the gap is rounding and stays what it is however long a run
    takes. If it grows, the rollout reads other weights than those that are trained.
    """

    def __init__(self) -> None:
        self._usual: list[float] = []
        self._unusual = 0
        self._warned = False

    def look(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes note of a step's metrics; those of a step without the metric say nothing."""
        gap = metrics.get(_METRIC)
        if gap is None or self._warned:
            return
        if len(self._usual) < _USUAL:
            self._usual.append(gap)
            return
        usual = statistics.median(self._usual)
        self._unusual = self._unusual + 1 if gap > max(_FACTOR * usual, usual + _MARGIN) else 0
        if self._unusual == _IN_A_ROW:
            self._warned = True
            logger.warning(
                "Step %d: %s is %.3g for the %drd time in a row, while it was %.3g at the start. Rounding does not grow, so the "
                "rollout samples from other weights than those that are trained. Look at its update_weights (a rollout that has "
                "weights_checksum is checked after every update), or at a model whose two computations differ more and more.",
                *(step, _METRIC, gap, _IN_A_ROW, usual),
            )
