"""Reads the responses of a step, all of them or a few."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.trainer.rollout_store.layout import NOTES, texts_path, tokens_path
from burnish.utils.errors import DataError
from burnish.utils.json_lines import read_lines


def read_texts(folder: str | Path, step: int) -> list[dict[str, Any]]:
    """The lines of a step; none where there is no such file."""
    path = texts_path(folder, step)
    return list(read_lines(path)) if path.is_file() else []


def read_tokens(folder: str | Path, step: int, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The rows of a step's token file: lists as numpy arrays, null as None.

    Args:
        rows: numbers of lines of the texts, in any order; None: all.

    Returns:
        one dict a row, in the order asked for; none where there is no such file.

    Raises:
        DataError: the file is damaged, or has no row of that number.
    """
    path = tokens_path(folder, step)
    if not path.is_file():
        return []
    try:
        table, places = _read_rows(path, rows)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a file of tokens: {error}.") from error
    columns = {name: _column(table.column(name)) for name in table.column_names}
    return [{name: values[place] for name, values in columns.items()} for place in places]


def read_notes(folder: str | Path, step: int) -> dict[str, Any]:
    """What `write_step` was given as ``notes``, with the ``step`` and the names of the reward function's ``extras``.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow.parquet as pq

    path = tokens_path(folder, step)
    if not path.is_file():
        return {}
    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata.get(NOTES, b"{}"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a file of tokens: {error}.") from error


def _read_rows(path: Path, rows: Sequence[int] | None) -> tuple[Any, list[int]]:
    """A table that holds the rows asked for, and where in it each of them is; reads no more row groups than needed."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if rows is None:
            return file.read(), list(range(file.metadata.num_rows))
        if wrong := [row for row in rows if not 0 <= row < file.metadata.num_rows]:
            raise ValueError(f"it has {file.metadata.num_rows} rows, and number {wrong[0]} was asked for")
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        groups = sorted({int(np.searchsorted(starts, row, side="right")) - 1 for row in rows})
        before = dict(zip(groups, np.concatenate([[0], np.cumsum([sizes[group] for group in groups])]), strict=False))
        group_of = [int(np.searchsorted(starts, row, side="right")) - 1 for row in rows]
        places = [int(row - starts[group] + before[group]) for row, group in zip(rows, group_of, strict=True)]
        return file.read_row_groups(groups), places


def _column(column: Any) -> list[Any]:
    import pyarrow as pa

    if not pa.types.is_list(column.type):
        return column.to_pylist()
    values: list[Any] = []
    for chunk in column.chunks:
        flat = chunk.values.to_numpy(zero_copy_only=False)
        offsets, is_valid = chunk.offsets.to_numpy(), chunk.is_valid().to_numpy(zero_copy_only=False)
        values += [
            flat[start:end] if there else None
            for start, end, there in zip(offsets[:-1], offsets[1:], is_valid, strict=True)
        ]
    return values
