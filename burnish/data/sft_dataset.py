"""The conversations of supervised fine-tuning, read, checked and rendered before anything else starts."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.sft import SFTDataConfig
from burnish.data import sft_cache
from burnish.data.files import sources_of
from burnish.data.prepared_dataset import PreparedDataset, RowCache, Split
from burnish.data.problems import Place
from burnish.data.sft_collate import sft_collate
from burnish.data.sft_prepare import ConversationPreparer, PreparedConversation, PreparedSequence
from burnish.data.sft_remarks import Level, remarks
from burnish.utils.errors import DataError

__all__ = ["SFTDataset", "sft_collate"]

logger = logging.getLogger(__name__)


class SFTDataset(PreparedDataset[PreparedConversation]):
    """Token sequences of conversations, each with what is learnt of it (see `burnish.render.ConversationRenderer`).

    Every row is checked and rendered at construction, so that a bad one is an error within seconds that names its file and
    row. An item is a dict: ``input_ids`` (list of ids), ``loss_mask`` (list of booleans as long, true on the learnt tokens, never
    on the first), ``index`` (the row's number among all rows read), ``data_source``. A row is one item; where the chat template
    writes earlier answers differently later and ``data.ignore_input_ids_mismatch`` is set, it may be several.

    Attributes:
        num_rows: rows read (after ``max_samples``).
        notes: how often what happened that is worth hearing of; `remarks` says it.
        num_tokens, num_learnt: of all items.

    Args:
        data_files: what ``data.train_files`` may be: one name or several.
        tokenizer: renders the conversations.
        config: the ``data`` section.
        max_samples: read at most the first so many rows; -1: all.
        key: the configuration key that named the files, for messages.

    Raises:
        DataError: a file or a row cannot be used, or nothing to learn is left.
        ModelError: the rows are conversations and the tokenizer has no chat template.
    """

    config: SFTDataConfig
    row_cache: RowCache = sft_cache

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        max_samples: int = -1,
        *,
        key: str = "data.train_files",
    ) -> None:
        split: Split = "val" if key == "data.val_files" else "train"
        self._start(tokenizer, config, split)
        self._add_all(self._prepared(sources_of(data_files, key), split, max_samples))
        self._finish(f"{key}={data_files}" if len(str(data_files)) < 300 else key)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item."""
        return [len(sequence.ids) for sequence in self._sequences]

    @property
    def remarks(self) -> list[tuple[Level, str]]:
        """What a user should hear of the rows, in sentences with a weight."""
        return remarks(self.notes, self.num_rows, self.config, self._first)

    def learnt_spans(self, position: int) -> list[tuple[int, int]]:
        """The learnt tokens of item ``position``, as [begin, end)."""
        return list(self._sequences[position].spans)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, position: int) -> dict[str, Any]:
        sequence = self._sequences[position]
        mask = np.zeros(len(sequence.ids), dtype=bool)
        for begin, end in sequence.spans:
            mask[begin:end] = True
        return {
            "input_ids": sequence.ids.tolist(),
            "loss_mask": mask.tolist(),
            "index": self._indices[position],
            "data_source": self._data_sources[position],
        }

    def _start(self, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, split: Split) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.num_rows = self.num_tokens = self.num_learnt = 0
        self.notes: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._sequences: list[PreparedSequence] = []
        self._indices: list[int] = []
        self._data_sources: list[str] = []
        self._places: list[Place] = []
        self._preparer = ConversationPreparer(tokenizer, config)

    def _add_all(self, rows: Iterable[PreparedConversation]) -> None:
        for row in rows:
            for name, number in row.notes.items():
                self.notes[name] += number
                self._first.setdefault(name, str(row.place))
            for sequence in row.sequences:
                self._sequences.append(sequence)
                self._indices.append(self.num_rows)
                self._data_sources.append(row.data_source)
                self._places.append(row.place)
                self.num_tokens += len(sequence.ids)
                self.num_learnt += sum(end - begin for begin, end in sequence.spans)
            self.num_rows += 1

    def _finish(self, origin: str) -> None:
        """Raises if nothing is left; logs what was changed."""
        if not self.num_rows:
            raise DataError(f"{origin}: it holds no rows. A row is a line of .jsonl, an entry of .json, a record.")
        said = self.remarks
        if not self._sequences:
            raise DataError(f"{origin}: there is nothing to learn. {' '.join(text for _, text in said)}")
        for level, text in said:
            logger.log(logging.WARNING if level == "warning" else logging.INFO, "%s: %s", origin, text)
