"""Mean, spread and extremes of the tokens in a mask.

A batch of long responses is large, and memory that was never touched is slow: the tokens are looked at a block of rows at a
time, and what the blocks say is merged, so that no matrix is made beside the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from burnish.core_algos.policy_difference import map_rows


class TokenStatistics:
    """Statistics of values, in float64; NaN among them makes each of them NaN.

    Args:
        values: of any number, float64.

    Attributes:
        count: how many there are.
        mean, maximum, minimum: of them; without a value 0 and the infinities.
    """

    def __init__(self, values: Tensor) -> None:
        self.count = values.numel()
        self.mean = values.mean() if self.count else values.new_zeros(())
        nothing = (values.new_tensor(torch.inf), values.new_tensor(-torch.inf))
        self.minimum, self.maximum = values.aminmax() if self.count else nothing
        self._squares = (values - self.mean).square_().sum()

    def merge(self, other: TokenStatistics) -> None:
        """Takes the values of ``other`` in."""
        total = self.count + other.count
        if total == 0:
            return
        # The squares around the new mean: those around the two old ones, and how far these are apart (Chan et al. 1979).
        apart = other.mean - self.mean
        self._squares = self._squares + other._squares + apart.square() * (self.count * other.count / total)
        self.mean = self.mean + apart * (other.count / total)
        self.maximum, self.minimum = (
            torch.maximum(self.maximum, other.maximum),
            torch.minimum(self.minimum, other.minimum),
        )
        self.count = total

    def variance(self, correction: int = 1) -> float:
        """Divided by count - ``correction``; 0 where that is not above 0."""
        divisor = self.count - correction
        return self._squares.item() / divisor if divisor > 0 else 0.0

    def summary(self, name: str) -> dict[str, float]:
        """``NAME/mean``, ``NAME/max`` and ``NAME/min``; nothing without a value."""
        if self.count == 0:
            return {}
        numbers = {"mean": self.mean, "max": self.maximum, "min": self.minimum}
        return {f"{name}/{key}": number.item() for key, number in numbers.items()}


def kept_tokens(tensor: Tensor, mask: Tensor, rows: slice) -> Tensor:
    """What ``tensor`` [batch, response] holds inside ``mask`` in ``rows``, as a new one-dimensional tensor in float64."""
    return tensor[rows].masked_select(mask[rows]).double()


def statistics_of_tokens(
    values_of: Callable[[slice], Mapping[str, Tensor]], mask: Tensor
) -> dict[str, TokenStatistics]:
    """Statistics by name.

    Args:
        values_of: the values of some rows by name, as `kept_tokens` gives them; the same names for all rows.
        mask: tells how many rows there are and how long they are.
    """

    def of_block(rows: slice) -> dict[str, TokenStatistics]:
        return {name: TokenStatistics(values) for name, values in values_of(rows).items()}

    return _merged(map_rows(of_block, mask))


def _merged(blocks: Sequence[dict[str, TokenStatistics]]) -> dict[str, TokenStatistics]:
    first, *others = blocks
    for block in others:
        for name, statistics in first.items():
            statistics.merge(block[name])
    return first
