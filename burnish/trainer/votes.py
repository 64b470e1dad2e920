"""The chance of each answer to win a vote among responses that are drawn from those to a prompt."""

import math
from functools import lru_cache
from typing import Any

import numpy as np

# Multiplications that the exact distribution of a vote may cost, for one pattern of answers; beyond it is drawn.
_EXACT_VOTE_COST = 300_000
_VOTE_DRAWS = 2_000


@lru_cache(maxsize=65536)
def win_chances(counts: tuple[int, ...], abstained: int, k: int, replace: bool) -> np.ndarray:
    """[answers] the chance of each answer to win a vote of k responses, where counts[a] responses give answer a (sorted,
    ascending) and ``abstained`` give none."""
    if not counts:
        return np.zeros(0)
    most = k if replace else min(k, counts[-1])
    if len(counts) * len(set(counts)) * most * k * k <= _EXACT_VOTE_COST:
        return _exact_win_chances(counts, abstained, k, replace)
    # Of the pattern and nothing else: the same prompts give the same numbers whatever else is in the file.
    generator = np.random.default_rng([k, abstained, *counts])
    total = sum(counts) + abstained
    everyone = np.array([*counts, abstained])
    if replace:
        drawn = generator.multinomial(k, everyone / total, size=_VOTE_DRAWS)
    else:
        drawn = generator.multivariate_hypergeometric(everyone, k, size=_VOTE_DRAWS, method="marginals")
    votes = drawn[:, :-1]
    tied = (votes == votes.max(1, keepdims=True)) & (votes > 0)
    return (tied / np.maximum(tied.sum(1, keepdims=True), 1)).mean(0)


def _exact_win_chances(counts: tuple[int, ...], abstained: int, k: int, replace: bool) -> np.ndarray:
    """For each number of votes m that wins: answer after answer, how many draws are left, how many answers have exactly m, and
    which of them are of each size.  Answers that as many responses give have the same chance."""
    sizes = sorted(set(counts))
    place = np.array([sizes.index(count) for count in counts])
    totals = np.zeros(len(sizes))
    for m in range(1, (k if replace else min(k, counts[-1])) + 1):
        most_tied = k // m
        # chance[left, tied], and members[left, tied, size]: the expected number of tied answers of that size.
        chance = np.zeros((k + 1, most_tied + 2))
        members = np.zeros((k + 1, most_tied + 2, len(sizes)))
        chance[k, 0] = 1.0
        remaining = sum(counts) + abstained
        for count, size in zip(counts, place, strict=True):
            split = _split(count, remaining, k, replace)
            next_chance, next_members = np.zeros_like(chance), np.zeros_like(members)
            for votes in range(m):
                weight = split[votes:, votes]
                next_chance[: k + 1 - votes] += weight[:, None] * chance[votes:]
                next_members[: k + 1 - votes] += weight[:, None, None] * members[votes:]
            weight = split[m:, m]
            next_chance[: k + 1 - m, 1:] += weight[:, None] * chance[m:, :-1]
            next_members[: k + 1 - m, 1:] += weight[:, None, None] * members[m:, :-1]
            next_members[: k + 1 - m, 1:, size] += weight[:, None] * chance[m:, :-1]
            chance, members = next_chance, next_members
            remaining -= count
        # What is left goes to those that abstained; where there are none, nothing may be left.
        ends = members.sum(0) if abstained else members[0]
        totals += (ends[1:] / np.arange(1, most_tied + 2)[:, None]).sum(0)
    return totals[place] / np.array([counts.count(count) for count in counts])


@lru_cache(maxsize=4096)
def _split(count: int, remaining: int, k: int, replace: bool) -> np.ndarray:
    """[k + 1 draws left, k + 1] the chance that so many of the draws go to ``count`` of ``remaining`` responses."""
    left, votes = np.arange(k + 1)[:, None], np.arange(k + 1)[None, :]
    if replace:
        ways = _log_choose(left, votes)
        share = count / remaining
        rest = np.where(left == votes, 0.0, np.log1p(-share) * (left - votes) if share < 1 else -np.inf)
        return np.exp(ways + votes * math.log(share) + rest)
    ways = _log_choose(count, votes) + _log_choose(remaining - count, left - votes)
    return np.where(left <= remaining, np.exp(ways - _log_choose(remaining, np.minimum(left, remaining))), 0.0)


def _log_choose(n: Any, k: Any) -> np.ndarray:
    """log C(n, k), -inf outside 0 <= k <= n, of arrays that broadcast."""
    n, k = np.broadcast_arrays(n, k)
    possible = (k >= 0) & (k <= n)
    inside = np.where(possible, k, 0)
    table = _log_factorials(int(np.max(n)))
    whole = np.maximum(n, 0)
    return np.where(possible, table[whole] - table[inside] - table[np.maximum(whole - inside, 0)], -np.inf)


@lru_cache(maxsize=64)
def _log_factorials(n: int) -> np.ndarray:
    return np.array([math.lgamma(i + 1) for i in range(max(n, 0) + 1)])
