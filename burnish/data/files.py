"""Dataset files to rows. A format is one function here and one line in `READERS`.

A row is a dict of JSON-like values. Rows of a file are counted from 0.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.utils.errors import DataError

Row = dict[str, Any]
LocatedRow = tuple[str, Row]


def resolve_files(files: str | Path | Sequence[str | Path], key: str = "data.train_files") -> list[Path]:
    """The files that ``key`` names, ``~`` expanded.

    Raises:
        DataError: none is named, one does not exist, or one is of a format that is not read.
    """
    named = [files] if isinstance(files, (str, Path)) else list(files)
    if not named:
        raise DataError(f"{key} names no file.")
    resolved = []
    for name in named:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.suffix in READERS)[:5])
            raise DataError(
                f"{key}={name}: this is a folder; name its files ({inside or 'it holds none that is read'})."
            )
        if not path.is_file():
            raise DataError(
                f"{key}={name}: there is no such file (looked for {path.absolute()}). Files on this machine are read; "
                f"a data set from a hub is saved as parquet or jsonl first."
            )
        if path.suffix.lower() not in READERS:
            raise DataError(
                f"{key}={name}: files whose names end in {', '.join(READERS)} are read, not {path.suffix!r}."
            )
        resolved.append(path)
    return resolved


def read_rows(path: Path) -> list[LocatedRow]:
    """All rows of one file, each with its place in words ("train.parquet, row 3").

    Raises:
        DataError: the file is not of the format that its name says, or a row of it is no object.
    """
    return list(READERS[path.suffix.lower()](path))


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    """One JSON object a line; a byte-order mark, blank lines and Windows line ends do no harm."""
    number = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                # A line separator inside a string (U+2028 and its like) is no line end: the file is split on newlines
                # only.
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {line_number}: this is not UTF-8: {error}.") from error
            if not text:
                continue
            location = f"{path}, row {number} (line {line_number})"
            number += 1
            yield location, _parse_json_row(text, location)


def _parse_json_row(text: str, location: str) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{location}: this is not JSON: {error}. A jsonl file holds one object a line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{location}: this is {type(row).__name__}, not an object with named columns.")
    return replace_surrogates(row) if "\\ud" in text.lower() else row


def _read_parquet(path: Path) -> Iterator[LocatedRow]:
    """Rows of a parquet file, without the null keys that the format adds to objects (see `drop_null_keys`)."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise DataError(f"{path}: this parquet file cannot be read: {error}") from error
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    number = 0
    for batch in table.select(names).to_batches(max_chunksize=1024):
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            yield f"{path}, row {number}", {name: drop_null_keys(value) for name, value in row.items()}
            number += 1


READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {".parquet": _read_parquet, ".jsonl": _read_jsonl}


def drop_null_keys(value: Any) -> Any:
    """``value`` without the keys of nested objects that are null.

    A parquet column of objects has one struct type, the union of the keys of all rows, so a row comes back with null
    under every key that only other rows have. A null that somebody wrote on purpose cannot be told from one of those
    and goes too; who needs it writes jsonl, or the column as a JSON string.
    """
    if isinstance(value, dict):
        return {key: drop_null_keys(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [drop_null_keys(entry) for entry in value]
    return value


def replace_surrogates(value: Any) -> Any:
    """``value`` with lone halves of surrogate pairs replaced by U+FFFD: they cannot be encoded as UTF-8."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(entry) for entry in value]
    return value
