"""Batches of rows, with a place that can be saved and restored."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from burnish.data.collate import collate_fn as default_collate_fn
from burnish.data.sampler import EpochSampler
from burnish.utils.errors import DataError

CollateFn = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def create_dataloader(
    dataset: Dataset[dict[str, Any]],
    batch_size: int,
    *,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
    drop_last: bool,
    collate_fn: CollateFn = default_collate_fn,
    sampler: Sampler[int] | None = None,
) -> StatefulDataLoader:
    """Batches of ``dataset``; ``state_dict`` and ``load_state_dict`` of the loader keep the place.

    Before an epoch call ``loader.sampler.set_epoch(epoch)`` (`EpochSampler`); a restored state counts for the epoch it was saved
    in and for no other. Nothing here draws from torch's global generator.

    Args:
        batch_size: rows a batch.
        shuffle, seed: the order, unless ``sampler`` gives it.
        num_workers: processes that read ahead; 0 reads in this one.
        drop_last: leave out a last batch that is smaller.

    Raises:
        DataError: the dataset gives no batch.
    """
    num_rows = len(dataset)  # type: ignore[arg-type]  # a map-style dataset has a length, its base class does not say so
    if num_rows == 0 or (drop_last and batch_size > num_rows):
        raise DataError(
            f"The dataset has {num_rows} rows, fewer than one batch of {batch_size} (data.train_batch_size): there is nothing to "
            f"train on. Make the batch smaller or the dataset larger; see how many rows were left out as too long."
        )
    return StatefulDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler or EpochSampler(dataset, shuffle=shuffle, seed=seed),  # type: ignore[arg-type]
        num_workers=num_workers,
        drop_last=drop_last,
        collate_fn=collate_fn,
        generator=torch.Generator().manual_seed(seed),
    )
