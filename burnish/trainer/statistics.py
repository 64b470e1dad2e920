"""What several responses to each of several prompts say: mean@n, best@k, worst@k, pass@k, maj@k, intervals, comparisons.

Every statistic is computed for each prompt first, then averaged over the prompts: a prompt counts once, however many responses
it has.  Values come as an array [prompts, samples], or as a list of arrays, one a prompt, where prompts have different numbers
of responses.  A NaN among the values of a prompt makes that prompt's numbers NaN.

best@k, worst@k and maj@k are expectations over drawing k of a prompt's n responses, and closed forms of it:

- ``replace=True`` draws with replacement, as verl's validation does (by 1,000 random draws).  It is defined for any k, and is
  lower than what k fresh responses would reach.
- ``replace=False`` draws k different ones, which is the unbiased estimate (arXiv:2107.03374 for pass@k).  It needs k <= n.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from burnish.trainer.intervals import Difference, Interval, compare, interval
from burnish.trainer.votes import win_chances

__all__ = [
    "Difference", "Drawn", "Interval", "Samples", "best_at_k", "compare", "group_rows", "interval", "ks", "maj_at_k", "mean_at_n",
    "pass_at_k", "std_at_n", "worst_at_k",
]  # fmt: skip

# [prompts, samples], or one array a prompt.
Samples = np.ndarray | Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A statistic of k responses drawn from each prompt's.

    Attributes:
        mean: [prompts] its expectation.
        std: [prompts] its standard deviation between draws; 0 where the draw cannot change it.
    """

    mean: np.ndarray
    std: np.ndarray


def group_rows(keys: Sequence[Hashable]) -> list[np.ndarray]:
    """The row numbers of each key (``uid``), in the order in which keys come first."""
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return [np.array(found) for found in rows.values()]


def ks(n: int) -> list[int]:
    """The k that are told for n responses: 2, 4, 8, ... and n itself; none for n = 1."""
    return sorted({2**power for power in range(1, n.bit_length())} | {n}) if n > 1 else []


def mean_at_n(values: Samples) -> np.ndarray:
    """[prompts] the mean of each prompt's responses."""
    return _per_prompt(values, lambda matrix: matrix.mean(1))


def std_at_n(values: Samples) -> np.ndarray:
    """[prompts] the standard deviation (of the n responses themselves, divided by n) of each prompt's responses."""
    return _per_prompt(values, lambda matrix: matrix.std(1))


def best_at_k(values: Samples, k: int, *, replace: bool) -> Drawn:
    """The largest of k responses drawn.

    E = sum_i x_(i) P(the largest is the i-th smallest), with P = (i/n)^k - ((i-1)/n)^k, or C(i-1, k-1) / C(n, k) without
    replacement.

    Raises:
        ValueError: k < 1, or k > n without replacement.
    """
    return _ordered(values, k, replace=replace, sign=1.0)


def worst_at_k(values: Samples, k: int, *, replace: bool) -> Drawn:
    """The smallest of k responses drawn: minus the best of the negated values."""
    return _ordered(values, k, replace=replace, sign=-1.0)


def pass_at_k(right: Samples, k: int) -> np.ndarray:
    """[prompts] the chance that at least one of k different responses is right: 1 - C(n - c, k) / C(n, k), of which c of n are
    right (arXiv:2107.03374, unbiased)."""
    return best_at_k(_map(right, lambda row: np.asarray(row, dtype=bool).astype(float)), k, replace=False).mean


def maj_at_k(values: Samples, votes: Sequence[Sequence[Hashable]], k: int, *, replace: bool) -> Drawn:
    """The value of the answer that most of k drawn responses give.

    Of answers with the same number of votes each is as likely; of the responses that give the winning answer, each is.  So the
    expectation needs the chance of every answer to win, which depends only on how many responses give each: exact for
    up to about 16 responses (and more where they give few answers), else by 2,000 draws from a fixed seed, which leave a
    standard error of at most 0.012 in one prompt's number.

    Args:
        values: [prompts, samples].
        votes: the answers, of the same lengths; None is a response that casts no vote: it is drawn, but never wins.
            Where nothing but None is drawn the value is 0.

    Raises:
        ValueError: k < 1, k > n without replacement, or other lengths of votes than of values.
    """
    means, stds = [], []
    for row, answers in zip(_rows(values), votes, strict=True):
        if len(row) != len(answers):
            raise ValueError(f"{len(row)} values and {len(answers)} votes of one prompt.")
        _check_k(k, len(row), replace)
        counts = Counter(answers)
        abstained = counts.pop(None, 0)
        order = sorted(counts, key=lambda answer: counts[answer])
        chances = win_chances(tuple(counts[answer] for answer in order), abstained, k, replace)
        weight = {answer: chance / counts[answer] for answer, chance in zip(order, chances, strict=True)}
        weights = np.array([weight.get(answer, 0.0) for answer in answers])
        mean = float(weights @ row)
        means.append(mean)
        stds.append(math.sqrt(max(0.0, float(weights @ np.square(row)) - mean * mean)))
    return Drawn(mean=np.array(means), std=np.array(stds))


def _ordered(values: Samples, k: int, *, replace: bool, sign: float) -> Drawn:
    def moments(matrix: np.ndarray) -> np.ndarray:
        weights = _best_weights(matrix.shape[1], k, replace)
        ranked = np.sort(sign * matrix, axis=1)
        mean = ranked @ weights
        # About the mean: a difference of squares would leave rounding where the draw cannot change anything.
        spread = np.square(ranked - mean[:, None]) @ weights
        return np.stack([sign * mean, np.sqrt(spread)], axis=1)

    found = _per_prompt(values, moments)
    return Drawn(mean=found[:, 0], std=found[:, 1]) if len(found) else Drawn(mean=np.zeros(0), std=np.zeros(0))


@lru_cache(maxsize=1024)
def _best_weights(n: int, k: int, replace: bool) -> np.ndarray:
    """[n] the chance of the i-th smallest of n to be the largest of k drawn."""
    _check_k(k, n, replace)
    if replace:
        return np.diff((np.arange(n + 1) / n) ** k)
    return np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])


def _check_k(k: int, n: int, replace: bool) -> None:
    if k < 1 or (k > n and not replace):
        raise ValueError(f"k={k}: a prompt has {n} responses, of which 1 to {n} different ones can be drawn.")


def _rows(values: Samples) -> list[np.ndarray]:
    return [np.asarray(row, dtype=float) for row in values]


def _map(values: Samples, function: Any) -> Samples:
    return (
        function(values) if isinstance(values, np.ndarray) and values.ndim == 2 else [function(row) for row in values]
    )


def _per_prompt(values: Samples, function: Any) -> np.ndarray:
    """``function`` of matrices [prompts, samples], one for each number of samples; its rows in the prompts' order."""
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return function(values.astype(float))
    found: list[Any] = [None] * len(values)
    for places, matrix in _by_size(_rows(values)):
        for place, row in zip(places, function(matrix), strict=True):
            found[place] = row
    return np.array(found, dtype=float)


def _by_size(rows: Sequence[np.ndarray]) -> Iterator[tuple[list[int], np.ndarray]]:
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(len(row), []).append(place)
    for size, found in places.items():
        if size == 0:
            raise ValueError("A prompt without responses has no statistics; leave it out.")
        yield found, np.stack([rows[place] for place in found])
