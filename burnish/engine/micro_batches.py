"""Which rows go through the model together. The result never depends on it; memory and speed do."""

import bisect
from collections.abc import Sequence

from burnish.utils.errors import ConfigError


def split_rows(
    lengths: Sequence[int], *, micro_batch_size: int | None = None, max_token_len: int | None = None
) -> list[list[int]]:
    """Row indices of each micro-batch: every row once, ascending inside a micro-batch.

    Args:
        lengths: tokens of each row.
        micro_batch_size: rows of a micro-batch, or None.
        max_token_len: tokens of a micro-batch, or None; a bound that holds. It comes first when both are given.
    """
    if max_token_len is not None:
        return split_by_tokens(lengths, max_token_len)
    size = micro_batch_size or max(1, len(lengths))
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def split_by_tokens(lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """Best-fit decreasing: the longest row first, each into the fullest micro-batch that still has room for it.

    Raises:
        ConfigError: a single row is longer than the bound.
    """
    longest = max(lengths, default=0)
    if longest > max_token_len:
        raise ConfigError(
            f"A micro-batch may hold max_token_len={max_token_len} tokens, but row {list(lengths).index(longest)} alone has "
            f"{longest}. Raise the *_max_token_len_per_gpu of this stage to at least max_prompt_length + "
            f"max_response_length, or shorten the rows."
        )
    # (free tokens, micro-batch), ascending: the first entry that fits is the fullest one that fits.
    free: list[tuple[int, int]] = []
    micro_batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = bisect.bisect_left(free, (lengths[row], -1))
        if place == len(free):
            room, index = max_token_len, len(micro_batches)
            micro_batches.append([])
        else:
            room, index = free.pop(place)
        micro_batches[index].append(row)
        bisect.insort(free, (room - lengths[row], index))
    return [sorted(rows) for rows in micro_batches]
