"""Statistics over groups of rows, by group id and never by position: rows of a group may lie anywhere in the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from burnish.core_algos.blocks import ROWS, over_blocks
from burnish.utils.errors import TrainingError

GroupIndex = np.ndarray | Tensor | Sequence
"""One group name per row: an object array (or list) of ``uid`` strings, or an integer array or tensor."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Which row belongs to which group.

    Attributes:
        ids: the group of each row, 0 to num_groups - 1.
        sizes: rows of each group, in float64 (a divisor).
    """

    ids: Int[Tensor, " batch"]
    sizes: Float[Tensor, " group"]

    @classmethod
    def of(cls, index: GroupIndex, num_rows: int, device: torch.device) -> "Groups":
        """Groups the rows whose entries in ``index`` are equal.

        Raises:
            TrainingError: not one entry per row, or entries that are no names (floats, None, mixed types).
        """
        if len(index) != num_rows:
            raise TrainingError(f"index has {len(index)} entries for {num_rows} rows: it names the group of each row.")
        ids = _tensor_ids(index) if isinstance(index, Tensor) else torch.from_numpy(_array_ids(np.asarray(index)))
        ids = ids.to(device)
        return cls(ids=ids, sizes=torch.bincount(ids).double())

    def sum(self, values: Shaped[Tensor, " batch"]) -> Float[Tensor, " group"]:
        """Sum of each group, in float64."""
        return torch.zeros_like(self.sizes).index_add_(0, self.ids, values.double())

    def sum_rows(self, *matrices: Float[Tensor, "batch column"]) -> tuple[Float[Tensor, "group column"], ...]:
        """Sum of the rows of each group, of each of the matrices, in float64."""
        totals = tuple(self.sizes.new_zeros(len(self.sizes), matrix.shape[1]) for matrix in matrices)

        def add(which: slice) -> None:
            for matrix, total in zip(matrices[which], totals[which], strict=True):
                # Few rows at once: they are made float64, and torch sorts the rows of many, which takes longer than adding.
                for start in range(0, len(matrix), ROWS):
                    rows = slice(start, start + ROWS)
                    total.index_add_(0, self.ids[rows], matrix[rows].double())

        over_blocks(add, len(matrices), 1, self.ids.device)
        return totals

    def mean(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " group"]:
        """Mean of each group, in float64."""
        return self.sum(values) / self.sizes

    def std(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " group"]:
        """Unbiased standard deviation (N - 1) of each group, in two passes and float64; 0 for a single row."""
        deviation = values.double() - self.mean(values)[self.ids]
        return (self.sum(deviation.square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    @property
    def is_single(self) -> Bool[Tensor, " group"]:
        """Groups of one row."""
        return self.sizes == 1

    def max(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " group"]:
        """Greatest value of each group, in float64."""
        return torch.zeros_like(self.sizes).scatter_reduce(0, self.ids, values.double(), "amax", include_self=False)

    def min(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " group"]:
        """Least value of each group, in float64."""
        return torch.zeros_like(self.sizes).scatter_reduce(0, self.ids, values.double(), "amin", include_self=False)

    def top_two(self, values: Float[Tensor, " batch"]) -> tuple[Float[Tensor, " group"], Float[Tensor, " group"]]:
        """The two greatest values of each group, in float64: equal where they tie, and -inf the second of a single row."""
        best = self.max(values)
        is_best = values == best[self.ids]
        second = self.max(torch.where(is_best, -torch.inf, values.double()))
        return best, torch.where(self.sum(is_best) > 1, best, second)

    def is_constant(self, values: Float[Tensor, " batch"]) -> Bool[Tensor, " group"]:
        """Groups whose values are all equal (max == min), single rows among them."""
        return self.max(values) == self.min(values)


def _tensor_ids(index: Tensor) -> Tensor:
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool or index.dim() != 1:
        raise TrainingError(
            f"index is a {index.dtype} tensor of shape {tuple(index.shape)}: "
            f"groups are named by one integer or uid string per row."
        )
    return torch.unique(index, return_inverse=True)[1]


def _array_ids(index: np.ndarray) -> np.ndarray:
    try:
        names, ids = np.unique(index, return_inverse=True)
    except TypeError as error:
        raise TrainingError(
            f"index mixes types that do not compare ({error}): groups are named by uid strings."
        ) from error
    wrong = sorted({type(name).__name__ for name in names.tolist() if type(name) not in (str, int)})
    if wrong or index.ndim != 1:
        raise TrainingError(
            f"index has shape {index.shape} and holds {', '.join(wrong) or 'names'}: "
            f"groups are named by one integer or uid string per row."
        )
    return ids.astype(np.int64)
