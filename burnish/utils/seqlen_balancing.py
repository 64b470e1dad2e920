"""Sharing out sequences so that every rank, or every micro-batch, has a like amount of work."""

import heapq
from collections.abc import Sequence

from burnish.utils.errors import BatchError

_Part = tuple[int, int, tuple[int, ...]]  # sum of lengths, number of items, indices

EVEN_LENGTH = 24_576
"""Tokens of a sequence that takes as long in attention as in everything else.

A block of width h takes about 24 h^2 multiplications and additions for a token, and causal attention 2 h for a token and each
token before it: the two are even at 12 h tokens. Models of width 900 to 4,000 are even at 11,000 to 49,000; this is width 2,048.
"""


LEAST_SAVING = 0.05
"""Share of the tokens from which on computing prompts once is worth the copies of keys and values that it takes."""


def sharing_pays(num_tokens: int, num_shared: int) -> bool:
    """Whether rows that compute ``num_tokens`` each by itself should share prompts, and so compute ``num_shared``."""
    return num_tokens > 0 and num_shared <= (1 - LEAST_SAVING) * num_tokens


def sequence_cost(length: int, context: int = 0) -> int:
    """Work of ``length`` tokens that follow ``context`` tokens computed elsewhere, in units of a token without attention
    divided by `EVEN_LENGTH`: linear in length, and quadratic by attention."""
    return length * (EVEN_LENGTH + length + 2 * context)


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Cuts the sequences into ``k_partitions`` parts whose sums of lengths are nearly equal.

    The largest differencing method of Karmarkar and Karp (1982) in its k-way form; with ``equal_size`` its balanced
    form, which starts from groups of ``k_partitions`` neighbours in order of length. Ties are broken by index, so that
    the result is a function of the arguments.

    Args:
        seqlen_list: length of each sequence, in tokens (or any cost).
        k_partitions: number of parts.
        equal_size: whether every part must hold the same number of sequences.

    Returns:
        Indices of each part in ascending order; no part is empty.

    Raises:
        BatchError: fewer sequences than parts, or, with ``equal_size``, a number of them that does not divide.
    """
    _check_lengths(seqlen_list)
    num = len(seqlen_list)
    if not 1 <= k_partitions <= num:
        raise BatchError(f"{num} sequences cannot be shared out to {k_partitions} parts, each with at least one.")
    if equal_size and num % k_partitions:
        raise BatchError(f"{num} sequences cannot be shared out to {k_partitions} parts of equal size.")
    items: list[_Part] = [(int(length), 1, (index,)) for index, length in enumerate(seqlen_list)]
    items.sort(key=_largest_first)
    per_state = k_partitions if equal_size else 1
    empty: list[_Part] = [(0, 0, ())] * (k_partitions - per_state)
    states = [items[start : start + per_state] + empty for start in range(0, num, per_state)]
    # The serial number breaks ties between states of equal spread.
    heap = [(state[-1][0] - state[0][0], serial, state) for serial, state in enumerate(states)]
    heapq.heapify(heap)
    for serial in range(len(states), 2 * len(states) - 1):
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (one[0] + other[0], one[1] + other[1], one[2] + other[2])
            for one, other in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=_largest_first)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
    return [sorted(indices) for _, _, indices in heap[0][2]]


def _largest_first(part: _Part) -> tuple:
    return -part[0], -part[1], part[2]


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 0:
            raise BatchError(f"Sequence {index} has the length {length}; lengths are not negative.")
