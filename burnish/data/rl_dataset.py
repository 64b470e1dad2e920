"""The prompts of a training or validation set, read, checked and rendered before anything else starts."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from burnish.config.data import DataConfig
from burnish.config.data_names import named_sets
from burnish.data import cache
from burnish.data.files import sources_of
from burnish.data.loader import num_rows_of
from burnish.data.prepare import PreparedRow, RowPreparer, length_policy
from burnish.data.prepared_dataset import PreparedDataset, RowCache, Split
from burnish.data.problems import Place
from burnish.data.tools import load_tools
from burnish.render import shows_tools
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.extern import load_class

logger = logging.getLogger(__name__)

Files = str | Path | Sequence[str | Path]


class RLHFDataset(PreparedDataset[PreparedRow]):
    """Rows of files (see `burnish.data.files`), with their prompts as ids.

    Every row is checked and rendered at construction, so that a bad one is an error within seconds that names its file
    and row.

    A row is a dict: ``input_ids`` (int64 tensor [prompt], not padded), ``raw_prompt`` (list of messages; a string where
    the tokenizer has no chat template), ``index`` (the row's number among all rows read; filtering does not change it),
    ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info``, the files' other columns (see
    `burnish.data.rows.read_columns`; None where a row's file has no such column), and ``validation_set`` where the files
    have names.

    Attributes:
        num_rows: rows read (after ``max_samples``).
        num_filtered: rows left out because their prompt is too long.
        num_truncated: rows whose prompt was shortened.
        num_empty: rows whose prompt asks nothing (see `burnish.render.is_empty_prompt`).
        remarks: what a user should hear of the rows beside these numbers, in sentences.

    Args:
        data_files: what ``data.train_files`` may be: one name or several; or such a thing for each name of a set.
        tokenizer: renders the prompts.
        config: the ``data`` section.
        processor: accepted for dataset classes written for multimodal models; must be None here.
        max_samples: read at most the first so many rows (of each set that has a name); -1: all.
        key: the configuration key that named the files, for messages; ``data.val_files``: no row is left out, however long
            its prompt (see `burnish.data.prepare.length_policy`).

    Raises:
        DataError: a file, a row or a prompt cannot be used, or no row is left.
    """

    config: DataConfig
    row_cache: RowCache = cache
    _preparer: RowPreparer

    def __init__(
        self,
        data_files: Files | Mapping[str, Files],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: object | None = None,
        max_samples: int = -1,
        *,
        key: str = "data.train_files",
    ) -> None:
        if processor is not None:
            raise ConfigError("Processors of multimodal models do not exist yet: RLHFDataset takes text prompts only.")
        split: Split = "val" if key == "data.val_files" else "train"
        sets = data_files if isinstance(data_files, Mapping) else {None: data_files}
        if not sets:
            raise DataError(f"{key} names no file.")
        self._start(tokenizer, config, split)
        for name, files in sets.items():
            named = key if name is None else f"{key}.{name}"
            self._add_all(self._prepared(sources_of(files, named), split, max_samples), name)
        self._finish(f"{key}={data_files}" if len(str(data_files)) < 300 else key)

    def _start(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, split: Split) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.num_rows = self.num_filtered = self.num_truncated = 0
        self.num_empty = self._num_templated = 0
        self.remarks: list[str] = []
        self._first_empty: Place | None = None
        self._columns: list[dict[str, Any]] = []
        self._prompts: list[np.ndarray] = []
        self._places: list[Place] = []
        self._absent: dict[str, None] = {}
        self._preparer = preparer_of(config, tokenizer, split)

    def _add_all(self, rows: Iterable[PreparedRow], set_name: str | None = None) -> None:
        for row in rows:
            number = self.num_rows
            self.num_rows += 1
            if row.ids is None:
                self.num_filtered += 1
                continue
            self.num_truncated += len(row.ids) < row.length
            self._num_templated += row.was_templated
            self.num_empty += row.is_empty
            if row.is_empty and self._first_empty is None:
                self._first_empty = row.place
            columns = {**row.columns, "index": number}
            if set_name is not None:
                columns["validation_set"] = set_name
            self._columns.append(columns)
            self._prompts.append(row.ids)
            self._places.append(row.place)

    def _finish(self, origin: str) -> None:
        """Raises if nothing is left; logs what was changed; finds the columns that only some rows have."""
        limit, policy = self.config.max_prompt_length, self._preparer.policy
        if not self._prompts:
            if not self.num_rows:
                raise DataError(f"{origin}: it holds no rows. A row is a line of .jsonl, an entry of .json, a record.")
            raise DataError(
                f"{origin}: no row is left: {self.num_rows} rows were read and {self.num_filtered} left out because their "
                f"prompts are longer than data.max_prompt_length={limit} tokens."
            )
        self._absent = dict.fromkeys(name for columns in self._columns for name in columns)
        if self.num_filtered:
            logger.warning(
                "%s: %d of %d rows were left out: their prompts are longer than data.max_prompt_length=%d tokens.",
                *(origin, self.num_filtered, self.num_rows, limit),
            )
        if self.num_truncated:
            asked = f"data.truncation={policy}"
            if policy != self.config.truncation or self.config.filter_overlong_prompts:
                asked = f"{policy}, since nothing is left out of the validation data"
            logger.warning(
                "%s: %d of %d prompts were cut to data.max_prompt_length=%d tokens (%s).",
                *(origin, self.num_truncated, self.num_rows, limit, asked),
            )
        self.remarks = self._remarks()
        for remark in self.remarks:
            logger.warning("%s: %s", origin, remark)

    def _remarks(self) -> list[str]:
        said = []
        if self.num_empty:
            said.append(
                f"{self.num_empty:,} of {self.num_rows:,} prompts are empty (no text, or white space alone), so nothing is "
                f"asked there, the first: {self._first_empty}. Leave such rows out, or set data.prompt_key where another "
                f"column than {self.config.prompt_key!r} holds the prompts."
            )
        if self._num_templated:
            said.append(
                f"{self._num_templated} prompts are texts that hold the chat template's own tokens "
                f"({' '.join(self._preparer.markers)}): they were templated before, and the template was applied to them "
                f"again, as to any text. Give messages, or texts without the template."
            )
        if self._hides_tools():
            said.append("the rows have tools, and the chat template shows none of them to the model.")
        return said

    def _hides_tools(self) -> bool:
        """Whether there are tools, and the template has no place for them: no row would ever say so."""
        of_rows: Any = next((row["tools"] for row in self._columns if row.get("tools")), None)
        tools = self._preparer.tools or of_rows
        if not tools or not self.tokenizer.chat_template:
            return False
        kwargs = self.config.apply_chat_template_kwargs
        prompt = self._columns[0]["raw_prompt"]
        return not shows_tools(prompt, self.tokenizer, tools, kwargs)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: int) -> dict[str, Any]:
        ids = torch.from_numpy(self._prompts[position].astype(np.int64))
        return {**self._absent, **self._columns[position], "input_ids": ids}


def preparer_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split) -> RowPreparer:
    """What prepares the rows of a split."""
    return RowPreparer(tokenizer, config, load_tools(config.tool_config_path), length_policy(config, split))


# Methods of verl's class of this name by which a subclass changes what is read. Nothing here would call them.
_NOT_CALLED = ("_download", "_read_files_and_tokenize", "maybe_filter_out_long_prompts", "_build_messages")


def _check_overridden(cls: Any) -> None:
    """A subclass of `RLHFDataset` changes rows where its author means to.

    Raises:
        ConfigError: it does so in a method that is never called.
    """
    is_ours = isinstance(cls, type) and issubclass(cls, RLHFDataset)
    found = [name for name in _NOT_CALLED if is_ours and hasattr(cls, name)]
    if found:
        raise ConfigError(
            f"data.custom_cls.name={cls.__name__}: {' and '.join(found)} would never be called, since RLHFDataset reads and "
            f"renders every row by itself when it is made. Change the rows beforehand, in the file or in an __init__ that hands "
            f"files of changed rows on; or make a torch.utils.data.Dataset whose rows have input_ids and index (docs/data.md)."
        )


def create_rl_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split = "train",
    rows: Iterable[Mapping[str, Any]] | None = None,
) -> Dataset[dict[str, Any]] | None:
    """The training or validation set: of ``rows`` if given, else of ``data.train_files`` or ``data.val_files``.

    Files are read by `RLHFDataset`, or by the class that ``data.custom_cls`` names. It is called with the keywords
    ``data_files, tokenizer, config, processor, max_samples``; it must be a ``torch.utils.data.Dataset`` whose rows have
    ``input_ids`` and ``index``. A method ``on_batch_end(batch)`` of it is called with every step's batch.

    Returns:
        None for a validation set of no files.

    Raises:
        ConfigError: ``data.custom_cls`` names no such class.
        DataError: as `RLHFDataset`, or the custom dataset is empty.
    """
    files: Any = config.train_files if split == "train" else config.val_files
    max_samples = config.train_max_samples if split == "train" else config.val_max_samples
    key = f"data.{split}_files"
    if rows is not None:
        return RLHFDataset.from_rows(rows, tokenizer, config, max_samples, name=f"{split}_dataset", split=split)
    if not files and split == "val":
        return None
    custom = config.custom_cls
    if custom.path is None:
        by_name = {name: names for name, names in named_sets(files).items() if name is not None}
        return RLHFDataset(by_name or files or [], tokenizer, config, max_samples=max_samples, key=key)
    cls = load_class(
        custom.path, custom.name, Dataset, path_key="data.custom_cls.path", name_key="data.custom_cls.name"
    )
    _check_overridden(cls)
    # A class of the user's own that is a subclass of ours learns from the key that nothing is to be left out.
    ours = (
        {"key": key}
        if isinstance(cls, type) and issubclass(cls, RLHFDataset) and cls.__init__ is RLHFDataset.__init__
        else {}
    )
    dataset = cls(data_files=files, tokenizer=tokenizer, config=config, max_samples=max_samples, processor=None, **ours)
    if num_rows_of(dataset) == 0:
        raise DataError(f"{key}={files}: {custom.name} of data.custom_cls has no row.")
    return dataset
