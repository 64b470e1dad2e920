"""Everything that is wrong with the rows, instead of the first thing."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.data import DataConfig
from burnish.config.data_names import named_sets
from burnish.data.files import read_source, sources_of
from burnish.data.prepare import prepare_rows
from burnish.data.prepared_dataset import Split, first_rows, rows_in_memory
from burnish.data.problems import RowError, RowProblem
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
            guarded = (
                row for source in sources for row in guarded_rows(read_source(source, split), str(source), problems)
            )
            parts.append(first_rows(guarded, max_samples))
    preparer = preparer_of(config, tokenizer, split)
    for part in parts:
        for row in prepare_rows(part, preparer, preparer.num_workers):
            if isinstance(row, RowError):
                problems.append(row.problem)
            if len(problems) >= max_problems:
                return problems[:max_problems]
    return problems


def guarded_rows(rows: Iterable[ReadRow], file: str, problems: list[RowProblem]) -> Iterable[ReadRow]:
    """The rows up to where the file cannot be read, which becomes a problem."""
    try:
        yield from rows
    except DataError as error:
        problems.append(problem_of(error, file))


def problem_of(error: DataError, file: str) -> RowProblem:
    """An error as a problem of its row, or of the whole file."""
    if isinstance(error, RowError) and error.place is not None:
        return error.problem
    return RowProblem(
        file=file, row=None, column=None, seen="", expected="a file that can be read to its end", message=str(error)
    )
