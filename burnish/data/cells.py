"""Values of cells to JSON's types, whatever the file's format has."""

import datetime
import decimal
import math
import uuid
from typing import Any

import numpy as np

from burnish.data.problems import RowError, describe

_JSON = "text, number, true or false, null, list or object"


# Far more than data has, and far less than functions that call themselves can go.
_MAX_DEPTH = 64


def to_json_types(value: Any, column: str, depth: int = 0) -> Any:
    """``value`` with nothing but text, numbers, booleans, None, lists and dicts with text keys, at any depth.

    ================================ ==================================================================================
    a date, a time, both             ISO 8601 text ("2024-05-01T10:00:00+00:00")
    a span of time                   its seconds
    a decimal number                 a whole number where it is one, else a float
    a UUID                           its text
    bytes                            the text that they are in UTF-8
    NaN                              null: the sign of a missing value in tables
    NumPy arrays and scalars, tuples lists and Python's own
    ================================ ==================================================================================

    Args:
        column: the name of the column, for messages.
        depth: of ``value`` in its cell.

    Raises:
        RowError: bytes that are no text, an infinite number, a value of any other type, or more than 64 levels.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return _finite(value, column)
    if depth > _MAX_DEPTH:
        raise RowError(
            f"column {column!r} is nested more than {_MAX_DEPTH} levels deep. Store it as a JSON string, or flatter.",
            column=column,
            seen=f"more than {_MAX_DEPTH} levels",
            expected=f"at most {_MAX_DEPTH} levels",
        )
    if kind is list or kind is tuple:
        return [to_json_types(entry, column, depth + 1) for entry in value]
    if kind is dict:
        return {str(key): to_json_types(entry, column, depth + 1) for key, entry in value.items()}
    return _other(value, column, depth)


def _other(value: Any, column: str, depth: int) -> Any:
    if isinstance(value, np.floating):
        return _finite(float(value), column)
    if isinstance(value, np.ndarray | np.generic):
        return to_json_types(value.tolist(), column, depth)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return _of_decimal(value, column)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return _of_bytes(bytes(value), column)
    # Subclasses of Python's own.
    base: Any
    for base in (bool, int, float, str, list, tuple, dict):
        if isinstance(value, base):
            return to_json_types(base(value), column, depth)
    raise RowError(
        f"column {column!r} holds {describe(value)}, which has no form in JSON. Store it as text or as a number.",
        column=column,
        seen=describe(value),
        expected=_JSON,
    )


def _finite(value: float, column: str) -> float | None:
    if math.isinf(value):
        raise RowError(
            f"column {column!r} holds {value}, which is no number of JSON's. Store a number, or null.",
            column=column,
            seen=str(value),
            expected="a finite number",
        )
    return None if math.isnan(value) else value


def _of_decimal(value: decimal.Decimal, column: str) -> int | float | None:
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    return _finite(float(value), column)


def _of_bytes(value: bytes, column: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"column {column!r} holds {len(value)} bytes that are no UTF-8 text (an image or a sound, perhaps); prompts "
            f"are text here. Write the file without them.",
            column=column,
            seen=f"bytes ({value!r:.40})",
            expected=_JSON,
        ) from error
