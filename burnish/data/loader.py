"""Batches of rows, with a place that can be saved and restored."""

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
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
    collate_fn: CollateFn | None = None,
    sampler: Sampler[int] | None = None,
    pad_token_id: int = 0,
) -> StatefulDataLoader:
    """Batches of ``dataset``; ``state_dict`` and ``load_state_dict`` of the loader keep the place (see `EpochSampler`).

    Iterate it once for each epoch. Nothing here draws from torch's global generator.

    Args:
        batch_size: rows a batch.
        shuffle, seed: the order, unless ``sampler`` gives it.
        num_workers: processes that read ahead; 0 reads in this one.
        drop_last: leave out a last batch that is smaller.
        collate_fn: rows to a batch; by default `burnish.data.collate_fn`, padding with ``pad_token_id``.

    Raises:
        DataError: the dataset gives no batch.
    """
    num_rows = num_rows_of(dataset)
    if num_rows == 0 or (drop_last and batch_size > num_rows):
        raise DataError(
            f"The dataset has {num_rows} rows, fewer than one batch of {batch_size} (data.train_batch_size): there is "
            f"nothing to train on. Set data.train_batch_size to at most {max(num_rows, 1)}, or give more rows."
        )
    with warnings.catch_warnings():
        # torchdata calls a function of torch that newer versions deprecate; nobody who reads the warning can mend it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler or EpochSampler(dataset, shuffle=shuffle, seed=seed),  # type: ignore[arg-type]
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn or partial(default_collate_fn, pad_token_id=pad_token_id),
            generator=torch.Generator().manual_seed(seed),
            worker_init_fn=_leave_signals_to_the_run,
        )


def num_rows_of(dataset: Any) -> int:
    """The length of a dataset, which may be of the user's own.

    Raises:
        DataError: it has none.
    """
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"The dataset {type(dataset).__name__} (data.custom_cls) has no length: rows are drawn by their number, so it needs "
            f"__len__ and __getitem__. Datasets that are only iterated are not supported."
        )
    return len(dataset)


def _leave_signals_to_the_run(worker: int) -> None:
    # A terminal sends Ctrl-C to all processes of a group, `timeout` and schedulers send SIGTERM; a run that is asked to stop may
    # still need its readers. In a group of its own a reader hears neither, and can still be ended by name.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.setpgid(0, 0)
