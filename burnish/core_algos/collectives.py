"""What a statistic over a whole mini-batch needs of the ranks that the mini-batch is spread over.

The algorithms know ranks only through this interface; the engine has the real one.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Collective(Protocol):
    """The ranks of one optimizer step. Every rank calls the same methods in the same order, or all of them hang."""

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum of ``values`` over the ranks, in float64; of the same shape on every rank."""

    def gather(self, values: Tensor) -> Tensor:
        """The one-dimensional ``values`` of all ranks, in the order of the ranks; each rank's may have any length."""


class OneRank:
    """The whole mini-batch lies here."""

    def sum(self, values: Tensor) -> Tensor:
        """``values`` in float64."""
        return values.double()

    def gather(self, values: Tensor) -> Tensor:
        """``values`` as they are."""
        return values


ONE_RANK = OneRank()
