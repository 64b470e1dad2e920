"""The rows of a run: from files, from Python, or of a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import Dataset

from burnish.config import SFTTrainerConfig
from burnish.data.loader import num_rows_of
from burnish.data.sft_dataset import SFTDataset, sft_collate
from burnish.protocol import DataProto
from burnish.utils.errors import DataError
from burnish.utils.extern import load_class


def create_sft_dataset(
    config: SFTTrainerConfig,
    tokenizer: Any,
    *,
    split: Literal["train", "val"],
    rows: Sequence[dict[str, Any]] | None = None,
) -> Any:
    """The rendered rows of a split; None where there is nothing to validate on.

    A class of the user's own (``data.custom_cls``) is called as `SFTDataset` is, and gives the same items.

    Args:
        rows: given in Python instead of being read from files.

    Raises:
        DataError: a row cannot be used, named with its place.
        ConfigError: the class cannot be loaded.
    """
    data = config.data
    files = data.train_files if split == "train" else data.val_files
    max_samples = data.train_max_samples if split == "train" else data.val_max_samples
    if rows is not None:
        return SFTDataset.from_rows(rows, tokenizer, data, max_samples, name=f"{split}_dataset", split=split)
    if not files:
        return None
    if data.custom_cls.path is None:
        return SFTDataset(files, tokenizer, data, max_samples, key=f"data.{split}_files")
    own: Callable[..., Any] = load_class(
        data.custom_cls.path,
        data.custom_cls.name,
        Dataset,
        path_key="data.custom_cls.path",
        name_key="data.custom_cls.name",
    )
    dataset = own(files, tokenizer, data, max_samples)
    if num_rows_of(dataset) == 0:
        raise DataError(f"data.{split}_files={files}: {data.custom_cls.name} of data.custom_cls has no row.")
    return dataset


def collate(items: Sequence[dict[str, Any]], pad_token_id: int = 0, vocab_size: int | None = None) -> DataProto:
    """Rows to a batch.

    Args:
        vocab_size: the tokenizer's number of ids; None: not known.

    Raises:
        DataError: a row of a class of the user's own has not what is needed.
    """
    for item in items:
        if not isinstance(item, Mapping):
            raise DataError(
                f"data.custom_cls: a row is {type(item).__name__}, not a dict with input_ids (a list of token ids) and loss_mask."
            )
        missing = [name for name in ("input_ids", "loss_mask") if name not in item]
        if missing:
            raise DataError(
                f"data.custom_cls: a row has no {' and no '.join(missing)}. A row has input_ids (a list of token ids) and "
                f"loss_mask (a list as long, true where the token is learnt); it has {', '.join(item) or 'nothing'}."
            )
    batch = sft_collate(items, pad_token_id)
    ids = batch.tensors["input_ids"][batch.tensors["attention_mask"]]
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        wrong = smallest if smallest < 0 else largest
        known = "from 0 on" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise DataError(f"data.custom_cls: a row has the token id {wrong}; the tokenizer's are {known}.")
    return batch
