"""Mean, spread and extremes of the tokens in a mask.

A batch of long responses is large, and memory that was never touched is slow: the tokens are looked at a block of rows at a
time, and what the blocks say is merged, so that no matrix is made beside the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from burnish.core_algos.policy_difference import row_blocks


def kept_tokens(mask: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What the tensors [batch, response] hold inside ``mask``, in float64: one-dimensional, a block of rows at a time."""
    for rows in row_blocks(mask):
        yield tuple(tensor[rows].masked_select(mask[rows]).double() for tensor in tensors)


class TokenStatistics:
    """Statistics of all values that were added, in float64; NaN among them makes each of them NaN.

    Attributes:
        count: how many there were.
        mean, maximum, minimum: of them; without a value 0 and the infinities.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros((), dtype=torch.float64)
        self.maximum, self.minimum = torch.tensor([-torch.inf, torch.inf], dtype=torch.float64).unbind()
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Takes one more block of values, of any number."""
        if values.numel() == 0:
            return
        mean, low, high = values.mean(), *values.aminmax()
        total = self.count + values.numel()
        # The squares around the new mean: those around the two old ones, and how far these are apart (Chan et al. 1979).
        apart = mean - self.mean
        between = apart.square() * (self.count * values.numel() / total)
        self._squares = self._squares + (values - mean).square_().sum() + between
        self.mean = self.mean + apart * (values.numel() / total)
        self.maximum, self.minimum = torch.maximum(self.maximum, high), torch.minimum(self.minimum, low)
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
