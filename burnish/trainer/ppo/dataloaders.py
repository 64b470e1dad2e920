"""Where the prompts of training and validation come from, batch by batch."""

import logging
from collections.abc import Callable
from typing import Any

from burnish.config import DataConfig
from burnish.data import create_dataloader, create_rl_sampler

logger = logging.getLogger("burnish.trainer")


def create_dataloaders(
    config: DataConfig,
    train_dataset: Any,
    val_dataset: Any,
    *,
    collate_fn: Callable | None,
    train_sampler: Any,
    pad_token_id: int,
) -> tuple[Any, Any]:
    """The loaders of training (whole batches only) and of validation (every row; None without a dataset).

    Args:
        train_sampler: order of the training rows; None: as ``data.shuffle``, ``data.seed`` and ``data.sampler`` say.

    Raises:
        DataError: the training rows do not fill one batch.
    """
    if config.dataloader_num_workers > 0 and hasattr(train_dataset, "on_batch_end"):
        logger.warning(
            "data.dataloader_num_workers=%d: %s hears of steps (on_batch_end) in the trainer's process alone. The processes that "
            "read ahead work on copies, which are made anew at the beginning of an epoch: what it learns changes rows of the "
            "next epoch only. Set data.dataloader_num_workers=0 where rows are to follow at once.",
            *(config.dataloader_num_workers, type(train_dataset).__name__),
        )
    common: dict[str, Any] = {
        "num_workers": config.dataloader_num_workers,
        "seed": config.seed,
        "pad_token_id": pad_token_id,
        "collate_fn": collate_fn,
    }
    train = create_dataloader(
        train_dataset,
        batch_size=config.train_batch_size,
        shuffle=config.shuffle,
        drop_last=True,
        sampler=train_sampler or create_rl_sampler(config, train_dataset),
        **common,
    )
    if val_dataset is None:
        return train, None
    validation = create_dataloader(
        val_dataset,
        batch_size=config.val_batch_size or len(val_dataset),
        shuffle=config.validation_shuffle,
        drop_last=False,
        **common,
    )
    return train, validation
