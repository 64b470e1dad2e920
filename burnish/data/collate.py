"""Rows of a dataset to one batch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from burnish.protocol import object_array
from burnish.utils.errors import DataError

# Made here, of the prompt ids and the index; a dataset class that pads its prompts itself has some of them too.
_MADE_HERE = ("input_ids", "attention_mask", "position_ids", "index", "uid")


def collate_fn(rows: Sequence[dict[str, Any]], pad_token_id: int = 0) -> dict[str, Any]:
    """A batch, as `DataProto.from_single_dict` takes it.

    Returns:
        ``input_ids``, ``position_ids`` (int64) and ``attention_mask`` (bool), each [batch, prompt], left-padded to the
        longest prompt; ``uid``, the row's ``index`` as text (the trainer puts the epoch before it), with "#1", "#2", ...
        behind it where rows before it in the batch have the same; every other column as an object array [batch], None
        where a row lacks it. Columns that are tensors in every row are stacked.

    Raises:
        DataError: a row has no ``input_ids`` or no ``index``, or tensors of a column differ in shape.
    """
    prompts = [_prompt_ids(row) for row in rows]
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        input_ids[i, width - len(prompt) :] = prompt
        attention_mask[i, width - len(prompt) :] = True
    batch: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0),
        "uid": object_array(unique_names([str(row["index"]) for row in rows])),
    }
    names = dict.fromkeys(name for row in rows for name in row if name not in _MADE_HERE)
    for name in names:
        batch[name] = _column(name, [row.get(name) for row in rows])
    return batch


def unique_names(names: Sequence[str]) -> list[str]:
    """``names`` with a number behind those that were there before: rows of one uid would be one group, with the same
    random streams and another prompt's baseline. A sampler may draw a row twice, a dataset may count by file."""
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(f"{name}#{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return unique


def _prompt_ids(row: dict[str, Any]) -> torch.Tensor:
    """The ids of a row's prompt [prompt], without the padding that its own mask may show."""
    missing = [name for name in ("input_ids", "index") if name not in row]
    if missing:
        raise DataError(f"A row of the dataset lacks {' and '.join(missing)}; it has: {', '.join(row)}.")
    ids = torch.as_tensor(row["input_ids"], dtype=torch.int64).reshape(-1)
    if "attention_mask" in row:
        ids = ids[torch.as_tensor(row["attention_mask"], dtype=torch.bool).reshape(-1)]
    return ids


def _column(name: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return object_array(values)
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise DataError(f"The tensors of column {name!r} differ in shape within a batch: {sorted(shapes)}.")
    return torch.stack(values)
