"""Everything that is wrong with the rows, instead of the first thing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.data import DataConfig
from burnish.config.data_names import named_sets
from burnish.data.files import Source, read_source, sources_of
from burnish.data.prepare import prepare_rows
from burnish.data.prepared_dataset import Split, check_max_samples, first_rows, rows_in_memory
from burnish.data.problems import FileError, Place, RowError, RowProblem
from burnish.data.readers import ReadRow
from burnish.data.rl_dataset import create_rl_dataset, preparer_of
from burnish.utils.errors import DataError


def check_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split = "train",
    rows: Iterable[Mapping[str, Any]] | None = None,
    max_problems: int = 100,
) -> list[RowProblem]:
    """Reads and renders the rows of a split as the dataset would, and says what is wrong with each.

    A file that cannot be read any further is one problem, and the other files are read. A dataset class of the user's own
    is made, and what it raises is one problem.

    Args:
        rows: the rows, where they come from memory.
        max_problems: looks for no more.
    """
    if rows is None and config.custom_cls.path is not None:
        try:
            create_rl_dataset(config, tokenizer, split=split)
        except DataError as error:
            return [problem_of(error, f"data.{split}_files")]
        return []
    max_samples = config.train_max_samples if split == "train" else config.val_max_samples
    parts: list[Iterable[ReadRow]] = []
    problems: list[RowProblem] = []
    if rows is not None:
        parts.append(first_rows(rows_in_memory(rows, f"{split}_dataset"), max_samples))
    else:
        for name, files in named_sets(config.train_files if split == "train" else config.val_files).items():
            key = f"data.{split}_files" + ("" if name is None else f".{name}")
            try:
                sources = sources_of(files, key)
            except DataError as error:
                problems.append(problem_of(error, key))
                continue
            parts.append(readable_rows(sources, split, max_samples))
    preparer = preparer_of(config, tokenizer, split)
    for part in parts:
        for row in prepare_rows(part, preparer, preparer.num_workers):
            if isinstance(row, RowError):
                problems.append(row.problem)
            if len(problems) >= max_problems:
                return problems[:max_problems]
    return problems


def readable_rows(sources: Sequence[Source], split: Split, max_samples: int) -> Iterator[ReadRow]:
    """The first ``max_samples`` rows of the sources. Where a file cannot be read any further, an error stands among them, which
    is not counted, and the other files follow."""
    check_max_samples(max_samples)
    num_left = max_samples
    for source in sources:
        try:
            for row in read_source(source, split):
                yield row
                num_left -= 1
                if num_left == 0:
                    return
        except DataError as error:
            yield Place(str(source), 0), _placed(error, str(source))


def problem_of(error: DataError, file: str) -> RowProblem:
    """An error as a problem of its row, or of the whole file."""
    return _placed(error, file).problem


def _placed(error: DataError, file: str) -> RowError:
    if isinstance(error, RowError) and error.place is not None:
        return error
    return FileError(str(error), file)
