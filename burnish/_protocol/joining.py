"""Joining what is no tensor: dicts, object arrays and ``meta_info`` of several batches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from burnish._protocol.equality import same_array, same_value
from burnish.utils.errors import BatchError


def object_array(values: Sequence | np.ndarray) -> np.ndarray:
    """A one-dimensional object array with an element a row, whatever the elements are.

    ``np.array(rows, dtype=object)`` would make two dimensions of lists that happen to be equally long.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.astype(object, copy=False)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def union_numpy_dict(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A dict with the arrays of both; those in both must be equal, NaN being equal to NaN."""
    for key in first.keys() & second.keys():
        if not same_array(first[key], second[key]):
            raise BatchError(f"Both batches have the non-tensor key {key!r}, with different values. Drop one.")
    return {**first, **second}


def union_two_dict(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """A dict with the entries of both; values of keys in both must be equal."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            raise BatchError(f"meta_info[{key!r}] is {first[key]!r} in one batch and {second[key]!r} in another.")
    return {**first, **second}


def pick(values: Mapping[str, Any], keys: Iterable[str] | None, kind: str) -> dict[str, Any]:
    """The entries of ``keys`` (all if ``None``); ``BatchError`` names the first that is missing."""
    if keys is None:
        return dict(values)
    keys = [keys] if isinstance(keys, str) else list(keys)
    missing = [key for key in keys if key not in values]
    if missing:
        raise BatchError(f"The batch has no {kind} key {missing[0]!r}; it has: {', '.join(values) or 'none'}.")
    return {key: values[key] for key in keys}


def check_same_keys(kind: str, keys: Sequence[Iterable[str]]) -> None:
    """Raises ``BatchError`` naming the keys that only some of the batches have."""
    first = set(keys[0])
    for number, other in enumerate(keys):
        if odd := sorted(first ^ set(other)):
            raise BatchError(f"Batches 0 and {number} cannot be concatenated: only one has the {kind} keys {odd}.")


def concat_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The union of ``meta_info`` of several parts, with their metrics gathered into one dict of lists."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list] = {}
    for part in parts:
        own = part.get("metrics") or []
        for entry in own if isinstance(own, list) else [own]:
            for name, value in entry.items():
                metrics.setdefault(name, []).append(value)
        merged = union_two_dict(merged, {key: value for key, value in part.items() if key != "metrics"})
    return {**merged, "metrics": metrics} if metrics else merged
