"""Which rows go through the model together. The result never depends on it; memory and speed do."""

import bisect
import heapq
import itertools
import operator
from collections.abc import Sequence

from burnish.utils.errors import ConfigError
from burnish.utils.seqlen_balancing import sequence_cost


def split_rows(
    lengths: Sequence[int],
    *,
    micro_batch_size: int | None = None,
    max_token_len: int | None = None,
    prompts: Sequence[int] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    num_micro_batches: int | None = None,
    num_sharing: int = 1,
    names: Sequence[str] | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch: every row once, ascending inside a micro-batch.

    Args:
        lengths: tokens of each row.
        micro_batch_size: rows of a micro-batch, or None.
        max_token_len: tokens of a micro-batch on one rank, or None; a bound that holds. It comes first when both are given.
        prompts: a number for each row, the same for rows whose prompt a micro-batch computes once; None: rows share nothing.
        prompt_lengths: how many tokens of each row are its prompt's; needed with ``prompts``.
        num_micro_batches: at least so many where the bound is of tokens, as far as there are rows: what other ranks have.
        num_sharing: ranks that share the tokens of a micro-batch evenly.
        names: of the rows, for errors.

    Raises:
        ConfigError: a single row is longer than the bound.
    """
    if max_token_len is not None:
        _check_bound(lengths, max_token_len, num_sharing, names)
        groups = _groups(lengths, prompts, prompt_lengths)
        return _split_by_tokens(groups, max_token_len * num_sharing, num_micro_batches or 1)
    size = micro_batch_size or max(1, len(lengths))
    order = list(range(len(lengths)))
    if prompts is not None:
        # Rows of one prompt next to each other, so that few of them are cut apart.
        first: dict[int, int] = {}
        order.sort(key=lambda row: first.setdefault(prompts[row], row))
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


def split_by_tokens(lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """`split_rows` by tokens, of rows that share nothing."""
    return split_rows(lengths, max_token_len=max_token_len)


def _check_bound(lengths: Sequence[int], max_token_len: int, num_sharing: int, names: Sequence[str] | None) -> None:
    longest = max(lengths, default=0)
    if longest <= max_token_len * num_sharing:
        return
    row = list(lengths).index(longest)
    name = "" if names is None else f" (uid {names[row]})"
    each = "" if num_sharing == 1 else f" on each of {num_sharing} workers"
    raise ConfigError(
        f"A micro-batch may hold max_token_len={max_token_len} tokens{each}, but row {row}{name} alone has {longest}. Set "
        f"the max_token_len_per_gpu of this stage to {-(-longest // num_sharing)} at least, which is the smallest bound "
        f"that works for these rows, or shorten the rows."
    )


class _Piece:
    """Rows with one prompt that stay together; or a single row, whose prompt is none of its own.

    Attributes:
        prompt: tokens of the prompt.
        rows, own: the rows, and the tokens of each after the prompt.
        num_tokens, cost: of all that is computed.
    """

    __slots__ = ("cost", "num_tokens", "own", "prompt", "rows")

    def __init__(self, prompt: int, rows: list[int], own: list[int]) -> None:
        self.prompt, self.rows, self.own = prompt, rows, own
        self.num_tokens, self.cost = prompt, sequence_cost(prompt)
        for length in own:
            self.num_tokens += length
            self.cost += sequence_cost(length, prompt)


def _groups(
    lengths: Sequence[int], prompts: Sequence[int] | None, prompt_lengths: Sequence[int] | None
) -> list[_Piece]:
    """The rows of each prompt, longest first."""
    if prompts is None:
        return [_Piece(0, [row], [length]) for row, length in enumerate(lengths)]
    assert prompt_lengths is not None
    groups: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        # What computes nothing has no prompt either; it would hide the length of the others' one.
        groups.setdefault(prompts[row] if lengths[row] else -1, []).append(row)
    pieces = []
    for rows in groups.values():
        prompt = prompt_lengths[rows[0]]
        pieces.append(_Piece(prompt, rows, [lengths[row] - prompt for row in rows]))
    return pieces


def _split_by_tokens(groups: list[_Piece], bound: int, at_least: int) -> list[list[int]]:
    """As few micro-batches as best-fit decreasing finds, then levelled."""
    if not groups:
        return []
    groups = sorted(groups, key=lambda group: (-group.num_tokens, group.rows[0]))
    fewest = max(1, -(-sum(group.num_tokens for group in groups) // bound))
    packed = _best_fit(groups, bound, fewest)
    if len(packed) > fewest:
        # With the number known from the start, fewer groups are cut before a micro-batch is opened.
        again = _best_fit(groups, bound, len(packed))
        packed = again if len(again) <= len(packed) else packed
    pieces = list(itertools.chain.from_iterable(packed))
    number = max(len(packed), at_least)
    if len(pieces) < number:
        pieces = _cut(pieces, number)
    levelled = _level(pieces, bound, min(number, len(pieces)))
    chosen = packed if levelled is None else levelled
    # The heaviest first: ranks that wait for each other after every micro-batch then wait least.
    chosen = sorted(chosen, key=lambda pieces: -sum(piece.cost for piece in pieces))
    return [sorted(row for piece in pieces for row in piece.rows) for pieces in chosen]


def _best_fit(groups: list[_Piece], bound: int, expected: int) -> list[list[_Piece]]:
    """Best-fit decreasing: each group into the fullest micro-batch that has room for it.

    Where none has, a new one is opened while there are fewer than ``expected``, else the group is cut, so that it fills what
    is free, at the price of one more computation of its prompt for each part. What fits nowhere opens a new one.

    Args:
        groups: longest first.
    """
    # (free tokens, micro-batch), ascending: the first entry that fits is the fullest one that fits.
    free: list[tuple[int, int]] = []
    micro_batches: list[list[_Piece]] = []

    def open_one() -> tuple[int, int]:
        micro_batches.append([])
        return bound, len(micro_batches) - 1

    def put(piece: _Piece, room: int, index: int) -> None:
        micro_batches[index].append(piece)
        bisect.insort(free, (room - piece.num_tokens, index))

    for group in groups:
        size = group.num_tokens
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            put(group, *free.pop(place))
            continue
        if size <= bound and (len(micro_batches) < expected or len(group.rows) == 1):
            put(group, *open_one())
            continue
        rows, own = list(group.rows), list(group.own)
        while rows:
            is_new = len(micro_batches) < expected or not free
            room, index = open_one() if is_new else free.pop()
            piece = _take_fitting(group.prompt, rows, own, room)
            if not piece.rows:
                bisect.insort(free, (room, index))
                room, index = open_one()
                piece = _take_fitting(group.prompt, rows, own, room)
            put(piece, room, index)
    return micro_batches


def _take_fitting(prompt: int, rows: list[int], own: list[int], room: int) -> _Piece:
    """Takes the rows that fit into ``room`` with their prompt out of ``rows``, the longest first, and ``own`` likewise."""
    room -= prompt
    taken: list[int] = []
    lengths: list[int] = []
    place = 0
    # They lie in order of length: where all rows of a batch have one prompt, this is asked for once for each micro-batch.
    while (place := bisect.bisect_left(own, -room, place, key=operator.neg)) < len(own):
        taken.append(rows.pop(place))
        lengths.append(own.pop(place))
        room -= lengths[-1]
    return _Piece(prompt, taken, lengths)


def _cut(pieces: list[_Piece], number: int) -> list[_Piece]:
    """More pieces, up to ``number``, by halving the heaviest that have more than one row."""
    whole = [piece for piece in pieces if len(piece.rows) == 1]
    heap = [(-piece.cost, index, piece) for index, piece in enumerate(pieces) if len(piece.rows) > 1]
    heapq.heapify(heap)
    serial = itertools.count(len(pieces))
    while heap and len(heap) + len(whole) < number:
        _, _, piece = heapq.heappop(heap)
        for half in (slice(0, None, 2), slice(1, None, 2)):
            part = _Piece(piece.prompt, piece.rows[half], piece.own[half])
            if len(part.rows) > 1:
                heapq.heappush(heap, (-part.cost, next(serial), part))
            else:
                whole.append(part)
    return whole + [piece for _, _, piece in heap]


def _level(pieces: list[_Piece], bound: int, number: int) -> list[list[_Piece]] | None:
    """The heaviest piece first, each into the micro-batch with the least work that has room; None where one has none."""
    heap = [(0, 0, index) for index in range(number)]
    micro_batches: list[list[_Piece]] = [[] for _ in range(number)]
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.rows[0])):
        limit = bound - piece.num_tokens
        full = []
        while heap and heap[0][1] > limit:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, tokens, index = heap[0]
        micro_batches[index].append(piece)
        heapq.heapreplace(heap, (load + piece.cost, tokens + piece.num_tokens, index))
        for entry in full:
            heapq.heappush(heap, entry)
    return micro_batches
