"""Whether two trainers learn alike: the test, which is fixed before anything is measured."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from burnish.trainer.intervals import student_quantile

CONFIDENCE = 0.95
"""Of all figures together: each is tested at 1 - (1 - CONFIDENCE) / number of figures (Bonferroni)."""
FIGURES = {
    "after": "held-out accuracy after the last step",
    "held_out_mean": "held-out accuracy, mean over the measured steps",
    "train_reward_mean": "score of training, mean over all steps",
}
SEEN = 0.1
"""A difference that has to be seen, of figures between 0 and 1: seeds too few for that do not make sides alike."""
RULE = (
    f"Two sides learn alike in a figure when the difference of their means over seeds is no larger than Student's quantile times "
    f"its standard error (Welch, unequal variances), two-sided, at {CONFIDENCE:.0%} for all {len(FIGURES)} figures together. "
    f"Where a difference of {SEEN:g} would be no larger than that either, it is undecided."
)


def figures(run: dict[str, Any]) -> dict[str, float]:
    """The figures of one run (see `benchmarks.results`) that are compared; of the curve, step 0 is not learnt."""
    learnt = [accuracy for step, accuracy in run["curve"] if step > 0]
    return {
        "after": learnt[-1],
        "held_out_mean": statistics.fmean(learnt),
        "train_reward_mean": statistics.fmean(run["train_reward"]),
    }


def welch(first: Sequence[float], second: Sequence[float], confidence: float) -> dict[str, float | None]:
    """``{"difference", "stderr", "degrees", "within"}``: second less first, and how large it may be by chance.

    The degrees of freedom are rounded down, which errs towards calling sides alike. ``within`` is None for fewer than two runs a
    side: one run says nothing of its own noise.
    """
    difference = statistics.fmean(second) - statistics.fmean(first)
    if min(len(first), len(second)) < 2:
        return {"difference": difference, "stderr": None, "degrees": None, "within": None}
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    total = sum(parts)
    if total == 0.0:
        return {"difference": difference, "stderr": 0.0, "degrees": None, "within": 0.0}
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    degrees = max(1, math.floor(total**2 / spread + 1e-9))
    stderr = math.sqrt(total)
    return {
        "difference": difference,
        "stderr": stderr,
        "degrees": degrees,
        "within": student_quantile((1 + confidence) / 2, degrees) * stderr,
    }


def verdict(burnish: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure the means, their difference (burnish less the peer) and what it says, and of all together.

    Returns:
        ``{"figures": {name: {"burnish", "peer", "difference", "stderr", "within", "says"}}, "says"}``; ``says`` is ``alike``,
        ``better`` or ``worse`` (burnish than the peer), ``undecided`` (see `SEEN`), or ``untested`` with one seed. Together it is
        ``worse`` where any figure is, else ``undecided``, else ``better`` where any is.
    """
    confidence = 1 - (1 - CONFIDENCE) / len(FIGURES)
    ours, theirs = [figures(run) for run in burnish], [figures(run) for run in peer]
    found: dict[str, Any] = {}
    for name in FIGURES:
        first, second = [each[name] for each in theirs], [each[name] for each in ours]
        test = welch(first, second, confidence)
        found[name] = {
            "burnish": statistics.fmean(second),
            "peer": statistics.fmean(first),
            **test,
            "says": _says(test["difference"], test["within"]),
        }
    said = {each["says"] for each in found.values()}
    together = next((word for word in ("untested", "worse", "undecided", "better") if word in said), "alike")
    return {"figures": found, "says": together}


def _says(difference: float | None, within: float | None) -> str:
    assert difference is not None
    if within is None:
        return "untested"
    # Equal values that were rounded on the way are equal.
    if abs(difference) <= within + 1e-12:
        return "alike" if within < SEEN else "undecided"
    return "better" if difference > 0 else "worse"
