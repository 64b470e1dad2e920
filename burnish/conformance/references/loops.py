"""What the naive loops are made of: plain Python on lists of numbers, one row and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = list[float]
Matrix = list[Row]
Arguments = Mapping[str, Any]
"""Tensors, arrays or nested lists by the name of the argument."""


def lists(values: Any) -> Any:
    """A tensor or an array as nested lists; lists stay."""
    return values.tolist() if hasattr(values, "tolist") else values


def kept(mask_row: Sequence[Any]) -> list[int]:
    """The places where the mask is 1."""
    return [t for t, inside in enumerate(mask_row) if inside]


def mean(numbers: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(numbers) / len(numbers)


def masked_mean(numbers: Sequence[float]) -> float:
    """The mean as it is defined for masks, where there may be nothing to divide by."""
    return math.fsum(numbers) / (len(numbers) + 1e-8)


def standard_deviation(numbers: Sequence[float]) -> float:
    """Divided by N - 1."""
    center = mean(numbers)
    return math.sqrt(math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


def clamp(x: float, low: float, high: float) -> float:
    """The nearest number in [low, high]; NaN where x is."""
    return x if math.isnan(x) else min(max(x, low), high)


def siblings(index: Sequence[Any], row: int) -> list[int]:
    """The rows of the group of ``row``, itself among them."""
    return [other for other in range(len(index)) if index[other] == index[row]]


def spread(per_row: Row, mask: Matrix) -> Matrix:
    """One number per row on each of its tokens in the mask."""
    return [[number if inside else 0.0 for inside in row] for number, row in zip(per_row, mask, strict=True)]


def whiten(matrix: Matrix, mask: Matrix, rows: Sequence[int] | None = None) -> Matrix:
    """(x - mean) / sqrt(var + 1e-8) over the tokens in the mask of ``rows`` (None: all); zero elsewhere."""
    counted = range(len(matrix)) if rows is None else rows
    tokens = [matrix[i][t] for i in counted for t in kept(mask[i])]
    result = [[0.0] * len(row) for row in matrix]
    if not tokens:
        return result
    center = mean(tokens)
    variance = standard_deviation(tokens) ** 2 if len(tokens) > 1 else 0.0
    for i in counted:
        for t in kept(mask[i]):
            result[i][t] = (matrix[i][t] - center) / math.sqrt(variance + 1e-8)
    return result


def token_by_token(loss: Callable[..., float], *matrices: Matrix) -> Matrix:
    """``loss`` of the entries of the matrices at each place."""
    return [[loss(*entries) for entries in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
