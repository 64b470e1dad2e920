"""The formats of files. A format is one function here and one line in `READERS`.

A reader yields each row with its place; where a row cannot be read but the next one can, it yields the error instead.
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.data.cells import to_json_types
from burnish.data.problems import Place, RowError
from burnish.utils.errors import DataError

Row = dict[str, Any]
ReadRow = tuple[Place, Row | RowError]

_ADVICE = {"json": "A .json file holds one array of objects, or one object a line."}
# The csv module's own limit, 128 KB, is less than one long solution.
_MAX_CELL = 1 << 30


class Named(Protocol):
    """A path, or what stands for a file elsewhere."""

    @property
    def name(self) -> str:
        """The last part."""


def format_of(path: Named) -> str | None:
    """The end of the name that says how a file is read (".jsonl.gz"), in lower case; None where none does."""
    name = path.name.lower()
    return next((suffix for suffix in sorted(READERS, key=len, reverse=True) if name.endswith(suffix)), None)


def read_file(path: Path) -> Iterator[ReadRow]:
    """The rows of a file, one after the other, with JSON's types in their cells; nothing is read before it is asked for.

    Raises:
        DataError: the file cannot be read as what its name says, from some place on.
    """
    suffix = format_of(path)
    assert suffix is not None  # `resolve_files` lets no other through
    try:
        for place, row in READERS[suffix](path):
            yield place, row if isinstance(row, RowError) else clean_row(row, place)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: this file cannot be read: {error}.") from error


def clean_row(row: Row, place: Place) -> Row | RowError:
    """The row with JSON's types in its cells, or what is wrong with it."""
    try:
        return {str(name): to_json_types(value, str(name)) for name, value in row.items()}
    except RowError as error:
        return error.at(place)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ JSON


def _read_jsonl(path: Path) -> Iterator[ReadRow]:
    """One JSON object a line; a byte-order mark, blank lines and Windows line ends do no harm."""
    with _open(path) as file:
        yield from _json_lines(path, file)


def _json_lines(path: Path, lines: Iterable[bytes], advice: str = "A .jsonl file holds one object a line.") -> Any:
    number = 0
    for line_number, line in enumerate(lines, start=1):
        place = Place(str(path), number, line_number)
        # Split on newlines only: a line separator inside a string (U+2028 and its like) is no line end.
        try:
            text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            yield (
                place,
                RowError(
                    f"this is not UTF-8: {error}. Save it as UTF-8.", place=place, seen="bytes", expected="UTF-8 text"
                ),
            )
            number += 1
            continue
        if not text:
            continue
        number += 1
        try:
            value: Any = parse_json(text)
        except ValueError as error:
            yield place, _not_json(error, place, advice)
        else:
            yield place, _object(value, text, place)


def _read_json(path: Path) -> Iterator[ReadRow]:
    """An array of objects; a file that holds one object a line, as many that are called so do, is read as such."""
    with _open(path) as file:
        data = file.read()
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        yield from _json_lines(path, io.BytesIO(data), _ADVICE["json"])
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: this is not UTF-8: {error}. Save it as UTF-8.") from error
    yield from _json_array(path, text)


def _json_array(path: Path, text: str) -> Iterator[ReadRow]:
    position = _skip_blanks(text, 0)
    if text[position : position + 1] != "[":
        begins = text[position : position + 20]
        what = f"begins with {begins!r}" if begins else "is empty"
        raise DataError(f"{path}: this file {what}. {_ADVICE['json']}")
    position = _skip_blanks(text, position + 1)
    number = 0
    while text[position : position + 1] != "]":
        place = Place(str(path), number)
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # Where the next row begins cannot be known.
            raise _not_json(error, place, _ADVICE["json"]) from error
        yield place, _object(value, text[position:end], place)
        number += 1
        position = _skip_blanks(text, end)
        if text[position : position + 1] == ",":
            position = _skip_blanks(text, position + 1)
        elif text[position : position + 1] != "]":
            raise DataError(f"{path}: after row {number - 1} there is neither a comma nor the array's end, ']'.")
    if text[position + 1 :].strip():
        raise DataError(f"{path}: there is more behind the array's end: {text[position + 1 :].strip()[:40]!r}.")


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or has NaN, an infinite number, a key twice in an object, or too many levels.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _not_json(error: Exception, place: Place, advice: str) -> RowError:
    what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
    return RowError(f"this is not JSON: {what}. {advice}", place=place, seen="text", expected="a JSON object")


def _object(value: Any, text: str, place: Place) -> Row | RowError:
    if not isinstance(value, dict):
        kind = type(value).__name__
        return RowError(
            f"this is {kind}, not an object with named columns.", place=place, seen=kind, expected="an object"
        )
    return replace_surrogates(value) if "\\ud" in text.lower() else value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice, so one of the two values would be lost")
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's; write null, or a number")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.20} is larger than a float can be")
    return number


# Refuses what other readers of JSON would lose or turn into something else.
_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)


# ------------------------------------------------------------------------------------------------- CSV


def _read_csv(path: Path) -> Iterator[ReadRow]:
    """Comma-separated values with a first line of names (RFC 4180). Every cell is text; an empty one is null."""
    limit = csv.field_size_limit(_MAX_CELL)
    try:
        with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            yield from _csv_rows(path, csv.reader(text, strict=True))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: this is not UTF-8: {error}. Save it as UTF-8.") from error
    except csv.Error as error:
        raise DataError(f"{path}: this is no CSV file: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _csv_rows(path: Path, reader: Any) -> Iterator[ReadRow]:
    names = next(reader, None)
    if names is None:
        return
    odd = [name for name in names if not name.strip() or names.count(name) > 1]
    if odd:
        raise DataError(
            f"{path}: the first line of a CSV file names the columns, and {odd[0]!r} is empty or there twice: "
            f"{', '.join(names)[:200]}."
        )
    number, end = 0, reader.line_num
    for cells in reader:
        place, end = Place(str(path), number, end + 1), reader.line_num
        if not cells:
            continue
        number += 1
        if len(cells) == len(names):
            yield place, {name: cell if cell else None for name, cell in zip(names, cells, strict=True)}
            continue
        seen, expected = f"{len(cells)} cells", f"{len(names)} cells"
        message = f"there are {seen} for {len(names)} columns. Put cells that hold a comma in double quotes."
        yield place, RowError(message, place=place, seen=seen, expected=expected)


# --------------------------------------------------------------------------------------------- Parquet


def _read_parquet(path: Path) -> Iterator[ReadRow]:
    """Rows of a parquet file, without the null keys that the format adds to objects (see `drop_null_keys`).

    What other programs wrote beside the columns (pandas' index, the features of the ``datasets`` library) is not read.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise DataError(f"{path}: the column {twice[0]!r} is there twice, so one of the two would be lost.")
            kept = [name for name in names if not name.startswith("__index_level_")]
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.select(kept).to_pylist(maps_as_pydicts="lossy"):
                    yield Place(str(path), number), {name: drop_null_keys(value) for name, value in row.items()}
                    number += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError, TypeError, RecursionError) as error:
        from_row = f" (from row {number} on)" if number else ""
        raise DataError(f"{path}: this parquet file cannot be read{from_row}: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[ReadRow]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
}


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
