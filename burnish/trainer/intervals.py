"""How sure a mean over prompts is, and whether one model is better than another on the same prompts."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_SIGN_DRAWS = 100_000
_EXACT_SIGN_SUMS = 200_000_000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval of confidence; both ends None where there are too few prompts for one."""

    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two models on the same prompts, second minus first.

    Attributes:
        mean: of the prompts' differences.
        interval: of that mean.
        p_value: of the two-sided test that flips the signs of the prompts' differences; 1 where none differs.
        test: how it was computed: ``mcnemar`` (exact; every prompt differs by the same amount or not at all),
            ``permutation, exact`` or ``permutation`` (random flips).
        num_better, num_worse, num_equal: prompts on which the second is better, worse, the same.
    """

    mean: float
    interval: Interval
    p_value: float
    test: str
    num_better: int
    num_worse: int
    num_equal: int


def interval(per_prompt: np.ndarray, *, num_responses: int | None = None, confidence: float = 0.95) -> Interval:
    """The interval of the mean over prompts, as they are a sample of all prompts; the clusters are the prompts.

    Args:
        per_prompt: [prompts] each prompt's number, of `mean_at_n`, `pass_at_k` and so on.
        num_responses: given where the numbers are shares (within [0, 1]) of so many responses in all.  Then it is Wilson's
            interval, of P p (1 - p) / var(per_prompt) effective responses: as many as there are prompts where each has one
            response, more where responses to a prompt vary, never more than ``num_responses``.  What is more than P rests on a
            variance that P prompts tell, and counts (z / t_(P-1))^2 as much: a few prompts do not make up for others.  It
            stays within [0, 1] and does not shrink to a point where all are right or all wrong.
            None: the numbers are of any scale.  Then it is Student's, mean +- t_(P-1) s / sqrt(P), of at least two prompts
            that do not all have the same number.
        confidence: of two sides.
    """
    values = np.asarray(per_prompt, dtype=float)
    count = len(values)
    if count == 0 or not np.isfinite(values).all():
        return Interval(low=None, high=None)
    mean = float(values.mean())
    if num_responses is not None:
        variance = float(values.var())
        between = mean * (1 - mean)
        # Without variance between prompts nothing is known of it: all right (or wrong) in every prompt is a matter of
        # prompts, all alike in between a matter of responses.
        alike = count if min(mean, 1 - mean) < 1e-12 else num_responses
        effective = min(count * between / variance if variance > 1e-15 else alike, num_responses)
        return wilson(mean, count + (effective - count) * _trust(count, confidence), confidence)
    # Of numbers that are all the same nothing is known of how prompts differ: a point would be no interval.
    if count < 2 or np.ptp(values) < 1e-12:
        return Interval(low=None, high=None)
    half = student_quantile((1 + confidence) / 2, count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return Interval(low=mean - half, high=mean + half)


def compare(first: np.ndarray, second: np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> Difference:
    """Two models by their numbers on the same prompts.

    The test's hypothesis is that which model a number is of does not matter; then every prompt's difference is as likely with
    the other sign.  Where all differences that are not 0 have one size this is McNemar's exact test.

    Args:
        first, second: [prompts] each prompt's number by the first and by the second model.
        seed: of the random flips, where there are too many for exact ones.

    Raises:
        ValueError: not the same number of prompts, or none.
    """
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(
            f"{len(first)} and {len(second)} prompts: a paired comparison needs the same ones, at least one."
        )
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    # Equal shares of different sums may differ in the last bit.
    differences[np.abs(differences) < 1e-12] = 0.0
    p_value, test = _sign_flips(differences[differences != 0], seed)
    return Difference(
        mean=float(differences.mean()),
        interval=interval(differences, confidence=confidence),
        p_value=p_value,
        test=test,
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
        num_equal=int((differences == 0).sum()),
    )


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t for ``probability`` in (0.5, 1) and whole degrees of freedom, by bisection."""
    low, high = 0.0, 1.0
    while _student_two_sided(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_two_sided(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _student_two_sided(t: float, degrees: int) -> float:
    """P(|T| <= t), by the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if degrees > 1000:
        return 2 * NormalDist().cdf(t) - 1
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for j in range(1, (degrees - odd) // 2 + 1):
        total += term
        term *= cosine * cosine * ((2 * j) / (2 * j + 1) if odd else (2 * j - 1) / (2 * j))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _trust(count: int, confidence: float) -> float:
    """How far a variance between so many prompts is to be relied on, from 0 for one prompt to 1 (Korn and Graubard, 1998)."""
    if count < 2:
        return 0.0
    upper = (1 + confidence) / 2
    return float((NormalDist().inv_cdf(upper) / student_quantile(upper, count - 1)) ** 2)


def wilson(share: float, count: float, confidence: float = 0.95) -> Interval:
    """Wilson's interval of a share of ``count`` responses, which need not be whole; it stays within [0, 1]."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return Interval(low=max(0.0, (middle - half) / scale), high=min(1.0, (middle + half) / scale))


def _sign_flips(differences: np.ndarray, seed: int) -> tuple[float, str]:
    """The share of sign flips whose sum is at least as far from 0, and the test's name.  None of the differences is 0."""
    count = len(differences)
    if count == 0:
        return 1.0, "permutation, exact"
    sizes = np.abs(differences)
    if np.allclose(sizes, sizes[0]):
        fewer = int(min((differences > 0).sum(), (differences < 0).sum()))
        # C(count, i), each from the one before: made anew each of them takes as long as all of them together.
        ways, tail = 1, 1
        for i in range(fewer):
            ways = ways * (count - i) // (i + 1)
            tail += ways
        return min(1.0, 2 * tail / 2**count), "mcnemar"
    for scale in range(1, 129):
        whole = np.rint(sizes * scale)
        if whole.min() > 0 and np.allclose(whole, sizes * scale, atol=1e-9, rtol=0):
            if count * whole.sum() > _EXACT_SIGN_SUMS:
                break
            return _exact_flips(whole.astype(int), abs(round(float(differences.sum()) * scale))), "permutation, exact"
    generator = np.random.default_rng(seed)
    observed = abs(float(differences.sum())) * (1 - 1e-12)
    hits, block = 0, max(1, 4_000_000 // count)
    for start in range(0, _SIGN_DRAWS, block):
        signs = generator.integers(0, 2, (min(block, _SIGN_DRAWS - start), count), dtype=np.int8) * 2.0 - 1.0
        hits += int((np.abs(signs @ sizes) >= observed).sum())
    return (hits + 1) / (_SIGN_DRAWS + 1), "permutation"


def _exact_flips(sizes: np.ndarray, observed: int) -> float:
    """P(|sum of whole sizes with random signs| >= observed): the sum's distribution, one size after the other."""
    total = int(sizes.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for size in sizes:
        moved = np.zeros_like(chances)
        moved[size:] += 0.5 * chances[:-size]
        moved[:-size] += 0.5 * chances[size:]
        chances = moved
    sums = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, chances[sums >= observed].sum()))
