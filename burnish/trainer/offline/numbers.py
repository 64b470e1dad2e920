"""What scores say of a model: the numbers of each prompt, their means with intervals, and two models beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from burnish.reward.score import Score
from burnish.trainer import statistics
from burnish.trainer.ppo.validation import VOTE_NAMES

REASONS = ("error", "timeout", "non_finite", "abstain")
"""Why a response has no score; the first three are failures of the reward function."""


def is_right(score: Score, pass_score: float) -> bool:
    """Whether a response counts as right: by ``acc`` where the reward function returns it, else by its score."""
    if score.value is None:
        return False
    acc = score.extras.get("acc")
    return bool(acc) if acc is not None else score.value >= pass_score


def prompt_numbers(
    groups: Sequence[Sequence[Score]], pass_score: float, sizes: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """Each prompt's numbers, [prompts] by name.

    Args:
        groups: the scores of each prompt's responses.
        sizes: the k of pass@k and maj@k; None: 1, 2, 4, ... and n.

    Returns:
        ``mean@n``, ``best@n`` (scores; NaN where none of the prompt's responses has one), ``pass@k`` and, where the reward
        function names answers, ``maj@k`` (shares of right ones; a response without a score is wrong and casts no vote). n is
        what every prompt has, k at most n.
    """
    n = min(map(len, groups))
    sizes = [1, *statistics.ks(n)] if sizes is None else sizes
    values = [[score.value for score in group if score.value is not None] for group in groups]
    found = {
        f"mean@{n}": np.array([np.mean(row) if row else np.nan for row in values]),
        f"best@{n}": np.array([max(row) if row else np.nan for row in values]),
    }
    right = [np.array([is_right(score, pass_score) for score in group], dtype=float) for group in groups]
    for k in sizes:
        found[f"pass@{k}"] = statistics.pass_at_k(right, k)
    if any(_answer_key(group) is not None for group in groups):
        votes = [_votes(group) for group in groups]
        for k in sizes:
            if k > 1:
                found[f"maj@{k}"] = statistics.maj_at_k(right, votes, k, replace=False).mean
    return found


def counts(scores: Sequence[Score]) -> dict[str, int]:
    """How many responses were scored, and why others were not."""
    scored = sum(score.value is not None for score in scores)
    return {"num_scored": scored} | {
        f"num_{reason}": sum(score.reason == reason for score in scores) for reason in REASONS
    }


def means(numbers: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    """The mean over prompts of each number; None where no prompt has it."""
    return {name: _mean(values) for name, values in numbers.items()}


def with_intervals(
    numbers: Mapping[str, np.ndarray], num_responses: int, confidence: float, *, is_share: Mapping[str, bool]
) -> dict[str, dict[str, float | None]]:
    """Mean and interval of each number.

    Args:
        num_responses: to all prompts.
        is_share: of each number whether it is a share, within [0, 1] (see `burnish.trainer.intervals.interval`).
    """
    found: dict[str, dict[str, float | None]] = {}
    for name, values in numbers.items():
        kept = values[np.isfinite(values)]
        count = num_responses if is_share[name] else None
        found[name] = {
            "value": _mean(values),
            **asdict(statistics.interval(kept, num_responses=count, confidence=confidence)),
        }
    return found


def shares(numbers: Mapping[str, np.ndarray], scores: Sequence[Score]) -> dict[str, bool]:
    """Which numbers are shares of right responses: pass@k and maj@k always, scores where all of them are 0 or 1."""
    binary = all(score.value in (0.0, 1.0) for score in scores if score.value is not None)
    return {name: name.startswith(("pass@", "maj@")) or binary for name in numbers}


def comparison(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], confidence: float
) -> dict[str, dict[str, Any]]:
    """The second model beside the first, number by number, over the prompts that have the number under both."""
    found = {}
    for name in (name for name in first if name in second):
        both = np.isfinite(first[name]) & np.isfinite(second[name])
        if not both.any():
            continue
        one, other = first[name][both], second[name][both]
        difference = statistics.compare(one, other, confidence=confidence)
        found[name] = {
            "first": float(one.mean()),
            "second": float(other.mean()),
            "difference": difference.mean,
            **asdict(difference.interval),
            "p_value": difference.p_value,
            "test": difference.test,
            "num_better": difference.num_better,
            "num_worse": difference.num_worse,
            "num_equal": difference.num_equal,
        }
    return found


def _mean(values: np.ndarray) -> float | None:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else None


def _answer_key(group: Sequence[Score]) -> str | None:
    return next((name for name in VOTE_NAMES if any(name in score.extras for score in group)), None)


def _votes(group: Sequence[Score]) -> list[str | None]:
    key = _answer_key(group)
    answers = [None if key is None or score.value is None else score.extras.get(key) for score in group]
    return [None if answer is None else str(answer) for answer in answers]
