"""The prompts of a training or validation set, read, checked and rendered before anything else starts."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from burnish.config.data import DataConfig
from burnish.data.files import LocatedRow, read_rows, replace_surrogates, resolve_files
from burnish.data.rows import read_columns, to_plain
from burnish.render import normalize_messages, render, template_markers, truncate
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.extern import load_class

logger = logging.getLogger(__name__)


class RLHFDataset(Dataset[dict[str, Any]]):
    """Rows of parquet or jsonl files, with their prompts as ids.

    Every row is checked and rendered at construction, so that a bad one is an error within seconds that names its file
    and row.

    A row is a dict: ``input_ids`` (int64 tensor [prompt], not padded), ``raw_prompt`` (list of messages; a string where
    the tokenizer has no chat template), ``index`` (the row's number among all rows read; filtering does not change it),
    ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info`` and the file's other columns (see
    `burnish.data.rows.read_columns`).

    Attributes:
        num_rows: rows read (after ``max_samples``).
        num_filtered: rows left out because their prompt is too long.
        num_truncated: rows whose prompt was shortened.

    Args:
        data_files: a path or several.
        tokenizer: renders the prompts.
        config: the ``data`` section.
        max_samples: read at most the first so many rows; -1: all.
        processor: accepted for dataset classes written for multimodal models; must be None here.
        key: the configuration key that named the files, for messages.

    Raises:
        DataError: a file, a row or a prompt cannot be used, or no row is left.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int = -1,
        processor: object | None = None,
        *,
        key: str = "data.train_files",
    ) -> None:
        if processor is not None:
            raise ConfigError("Processors of multimodal models do not exist yet: RLHFDataset takes text prompts only.")
        files = resolve_files(data_files, key)
        rows = (row for file in files for row in read_rows(file))
        self._load(rows, f"{key}={', '.join(map(str, files))}", tokenizer, config, max_samples)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int = -1,
        *,
        name: str = "dataset",
    ) -> "RLHFDataset":
        """The dataset of rows in memory; ``name`` stands for the file in messages. NumPy values become Python's."""
        dataset = cls.__new__(cls)
        located = ((f"{name}, row {i}", replace_surrogates(to_plain(dict(row)))) for i, row in enumerate(rows))
        dataset._load(located, name, tokenizer, config, max_samples)
        return dataset

    def _load(
        self,
        rows: Iterable[LocatedRow],
        origin: str,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.num_rows = self.num_filtered = self.num_truncated = 0
        self._columns: list[dict[str, Any]] = []
        self._prompts: list[np.ndarray] = []
        self._locations: list[str] = []
        markers = template_markers(tokenizer)
        num_templated = 0
        for location, row in rows:
            if 0 <= max_samples <= self.num_rows:
                break
            num_templated += self._add_row(location, row, markers)
            self.num_rows += 1
        self._report(origin, num_templated, markers)

    def _add_row(self, location: str, row: dict[str, Any], markers: Sequence[str]) -> bool:
        """Adds a row unless its prompt is too long; says whether the prompt was a text that was templated before."""
        config = self.config
        columns = read_columns(row, location, prompt_key=config.prompt_key, source_key=config.reward_fn_key)
        prompt = columns["raw_prompt"]
        policy = "drop" if config.filter_overlong_prompts else config.truncation
        try:
            if self.tokenizer.chat_template:
                columns["raw_prompt"] = normalize_messages(prompt)
            ids = render(prompt, self.tokenizer, chat_template_kwargs=config.apply_chat_template_kwargs)
            kept = truncate(ids, config.max_prompt_length, policy)
        except DataError as error:
            raise DataError(f"{location}: {error}") from error
        if kept is None:
            self.num_filtered += 1
            return False
        self.num_truncated += len(kept) < len(ids)
        columns["index"] = self.num_rows
        self._columns.append(columns)
        self._prompts.append(np.asarray(kept, dtype=np.int32))
        self._locations.append(location)
        return isinstance(prompt, str) and any(marker in prompt for marker in markers)

    def _report(self, origin: str, num_templated: int, markers: Sequence[str]) -> None:
        """Raises if nothing is left; logs what was changed."""
        limit = self.config.max_prompt_length
        if not self._prompts:
            raise DataError(
                f"{origin}: no row to train on: {self.num_rows} rows were read and {self.num_filtered} left out "
                f"because their prompts are longer than data.max_prompt_length={limit} tokens."
            )
        if self.num_filtered:
            logger.warning(
                "%s: %d of %d rows were left out: their prompts are longer than data.max_prompt_length=%d tokens.",
                *(origin, self.num_filtered, self.num_rows, limit),
            )
        if self.num_truncated:
            logger.warning(
                "%s: %d of %d prompts were cut to data.max_prompt_length=%d tokens (data.truncation=%s).",
                *(origin, self.num_truncated, self.num_rows, limit, self.config.truncation),
            )
        if num_templated:
            logger.warning(
                "%s: %d prompts are texts that hold the chat template's own tokens (%s): they were templated before, "
                "and the template was applied to them again, as to any text. Give messages, or texts without the "
                "template.",
                *(origin, num_templated, " ".join(markers)),
            )

    def location(self, position: int) -> str:
        """Where row ``position`` of the dataset comes from, in words: "train.parquet, row 3"."""
        return self._locations[position]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> dict[str, Any]:
        ids = torch.from_numpy(self._prompts[position].astype(np.int64))
        return {**self._columns[position], "input_ids": ids}


def create_rl_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "val"] = "train",
    rows: Iterable[Mapping[str, Any]] | None = None,
) -> Dataset[dict[str, Any]] | None:
    """The training or validation set: of ``rows`` if given, else of ``data.train_files`` or ``data.val_files``.

    Files are read by `RLHFDataset`, or by the class that ``data.custom_cls`` names. It is called with the keywords
    ``data_files, tokenizer, config, max_samples, processor``; it must be a ``torch.utils.data.Dataset`` whose rows have
    ``input_ids`` and ``index``.

    Returns:
        None for a validation set of no files.

    Raises:
        ConfigError: ``data.custom_cls`` names no such class.
        DataError: as `RLHFDataset`, or the custom dataset is empty.
    """
    files = config.train_files if split == "train" else config.val_files
    max_samples = config.train_max_samples if split == "train" else config.val_max_samples
    key = f"data.{split}_files"
    if rows is not None:
        return RLHFDataset.from_rows(rows, tokenizer, config, max_samples, name=f"{split}_dataset")
    if not files and split == "val":
        return None
    custom = config.custom_cls
    if custom.path is None:
        return RLHFDataset(files or [], tokenizer, config, max_samples, key=key)
    cls = load_class(
        custom.path, custom.name, Dataset, path_key="data.custom_cls.path", name_key="data.custom_cls.name"
    )
    dataset = cls(data_files=files, tokenizer=tokenizer, config=config, max_samples=max_samples, processor=None)
    if len(dataset) == 0:
        raise DataError(f"{key}={files}: {custom.name} of data.custom_cls has no row.")
    return dataset
