"""What the data sets of prompts and of conversations share: rows of files or of Python, prepared one by one or kept before."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from burnish.data.files import Source, read_source
from burnish.data.prepare import Preparer, prepare_rows
from burnish.data.problems import Place, RowError
from burnish.data.readers import ReadRow, clean_row, replace_surrogates
from burnish.utils.errors import DataError

Split = Literal["train", "val"]
Row = TypeVar("Row")


class RowCache(Protocol):
    """A module that keeps the prepared rows of one kind of data set; see `burnish.data.cache`."""

    def cache_file(self, preparer: Any, sources: Sequence[Source], *, split: str, max_samples: int) -> Path:
        """The file of a data set in ``data.cache_dir``."""

    def load(self, file: Path) -> list[Any] | None:
        """Its rows; None where there are none."""

    def save(self, file: Path, rows: Sequence[Any]) -> None:
        """Writes them."""


class PreparedDataset(Dataset[dict[str, Any]], Generic[Row], ABC):
    """A data set whose rows are all checked and rendered when it is made. ``Row`` is what its preparer makes of one."""

    row_cache: RowCache
    config: Any
    _preparer: Preparer[Row]
    _places: list[Place]

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        max_samples: int = -1,
        *,
        name: str = "dataset",
        split: Split = "train",
    ) -> Self:
        """The dataset of rows in memory; ``name`` stands for the file in messages. NumPy values become Python's."""
        dataset = cls.__new__(cls)
        dataset._start(tokenizer, config, split)
        dataset._add_all(dataset._prepare(first_rows(rows_in_memory(rows, name), max_samples)))
        dataset._finish(name)
        return dataset

    def location(self, position: int) -> str:
        """Where item ``position`` comes from, in words: "train.jsonl, row 3 (line 4)"."""
        return str(self._places[position])

    @abstractmethod
    def _start(self, tokenizer: PreTrainedTokenizerBase, config: Any, split: Split) -> None:
        """Makes an empty data set."""

    @abstractmethod
    def _add_all(self, rows: Iterable[Row]) -> None:
        """Takes the prepared rows in."""

    @abstractmethod
    def _finish(self, origin: str) -> None:
        """Raises if nothing is left; logs what was changed."""

    def _prepared(self, sources: list[Source], split: Split, max_samples: int) -> Iterable[Row]:
        """The rows of the sources, from the cache where it has them."""
        file = None
        if self.config.cache_dir is not None:
            file = self.row_cache.cache_file(self._preparer, sources, split=split, max_samples=max_samples)
            kept = self.row_cache.load(file)
            if kept is not None:
                return kept
        prepared = self._prepare(
            first_rows((row for source in sources for row in read_source(source, split)), max_samples)
        )
        if file is None:
            return prepared
        all_rows = list(prepared)
        self.row_cache.save(file, all_rows)
        return all_rows

    def _prepare(self, rows: Iterable[ReadRow]) -> Iterator[Row]:
        """The rows prepared; raises what is wrong with the first bad one."""
        for row in prepare_rows(rows, self._preparer, self._preparer.num_workers):
            if isinstance(row, RowError):
                raise row
            yield row


def rows_in_memory(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[ReadRow]:
    """Rows as a reader gives them, with JSON's types in their cells."""
    for number, row in enumerate(rows):
        place = Place(name, number)
        cleaned = clean_row(dict(row), place)
        yield place, cleaned if isinstance(cleaned, RowError) else replace_surrogates(cleaned)


def first_rows(rows: Iterator[ReadRow], number: int) -> Iterator[ReadRow]:
    """The first ``number`` rows, and no more is read; all where it is negative.

    Raises:
        DataError: it is 0.
    """
    check_max_samples(number)
    return islice(rows, number) if number >= 0 else rows


def check_max_samples(number: int) -> None:
    """Raises DataError where no row would be read."""
    if number == 0:
        raise DataError(
            "data.train_max_samples or data.val_max_samples is 0, so no row would be read. Set -1 for all rows; null as "
            "data.val_files for no validation."
        )
