"""A rank's share of a batch.

The driver cuts a batch into equal shards. Rows that only make it divisible are copies of other rows whose masks say
"nothing to train on here"; the worker's method never returns them, because what it returns for them is dropped where
it was worked on. So a padded call leaves no trace, whether its result is waited for or handed on as a future.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor
from burnish.utils.errors import WorkerError

MASKS_OF_PADDING = ("response_mask", "loss_mask")
"""Batch keys that are set to False in padding rows, so that these count in no sum."""

NUM_PADDING = "num_padding"
"""Entry of ``meta_info`` that tells a worker's method how many of its last rows are padding; absent where there is none."""


@dataclass(frozen=True)
class Shard:
    """The rows of one rank; the last ``num_padding`` of them only make the batch divisible."""

    data: DataProto
    num_padding: int


@dataclass(frozen=True)
class FutureShard:
    """The rows of one rank of a batch that is still being computed; cut where it is used, not on the driver."""

    future: DataProtoFuture
    index: int
    num_shards: int

    def resolve(self) -> Shard:
        """Waits for the batch and cuts this rank's rows out of it."""
        return split_rows(self.future.get(), self.num_shards)[self.index]

    def unresolved(self) -> DataProtoFuture:
        """The same rows as a future; the batch then has to be divisible."""
        return self.future.chunk(self.num_shards)[self.index]


def split_rows(data: DataProto, num_shards: int) -> list[Shard]:
    """Cuts ``data`` into ``num_shards`` shards with the same number of rows, in order; padding comes last."""
    num_rows = len(data)
    if num_shards == 1 or num_rows == 0:
        return [Shard(data, 0)] * num_shards
    padded, num_padding = pad_dataproto_to_divisor(data, num_shards)
    if num_padding:
        _mask_last_rows(padded, num_padding)
    chunks = padded.chunk(num_shards)
    rows = len(chunks[0])
    shards = [Shard(chunk, min(rows, max(0, (i + 1) * rows - num_rows))) for i, chunk in enumerate(chunks)]
    for shard in shards:
        if shard.num_padding:
            shard.data.meta_info = shard.data.meta_info | {NUM_PADDING: shard.num_padding}
    return shards


def _mask_last_rows(padded: DataProto, num_padding: int) -> None:
    if padded.batch is None:
        return
    for key in MASKS_OF_PADDING:
        if key in padded.batch.keys():  # noqa: SIM118 (no mapping)
            # A copy, since the padded batch may share its storage with the caller's.
            mask = padded.batch[key].clone()
            mask[-num_padding:] = 0
            padded.batch[key] = mask


def receive(
    args: Sequence[Any], kwargs: Mapping[str, Any], materialize_futures: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], Shard | None]:
    """On the worker: arguments as the method expects them, and the shard whose padding its result must lose.

    Raises:
        WorkerError: batches among the arguments that were computed elsewhere turn out to have different sizes.
    """
    shards: list[Shard] = []

    def unwrap(value: Any) -> Any:
        if isinstance(value, FutureShard):
            value = value.resolve() if materialize_futures else value.unresolved()
        elif isinstance(value, DataProtoFuture) and materialize_futures:
            value = value.get()
        if isinstance(value, Shard):
            shards.append(value)
            return value.data
        return value

    plain_args = tuple(unwrap(value) for value in args)
    plain_kwargs = {key: unwrap(value) for key, value in kwargs.items()}
    sizes = sorted({(len(shard.data), shard.num_padding) for shard in shards})
    if len(sizes) > 1:
        raise WorkerError(
            f"The batches of one call have different numbers of rows: this rank got {[size for size, _ in sizes]}."
        )
    return plain_args, plain_kwargs, shards[0] if shards else None


def drop_padding(result: Any, shard: Shard | None) -> Any:
    """``result`` without what belongs to the padding rows of ``shard``.

    A method may return k rows for each row it got, next to each other; anything but a DataProto with rows is kept.

    Raises:
        WorkerError: the number of rows does not tell which of them belong to padding.
    """
    if shard is None or shard.num_padding == 0 or not isinstance(result, DataProto) or len(result) == 0:
        return result
    copies, rest = divmod(len(result), len(shard.data))
    if rest:
        raise WorkerError(
            f"The method got {len(shard.data)} rows, {shard.num_padding} of them padding, and returned {len(result)}; "
            f"which of them belong to padding is unknown. Return the same number of rows for each row, or give the "
            f"method a batch that divides by the number of workers."
        )
    kept = result.slice(0, len(result) - shard.num_padding * copies)
    kept.meta_info = {key: value for key, value in kept.meta_info.items() if key != NUM_PADDING}
    return kept
