"""What is done to the rows of a batch, given one way to apply a choice of rows to all its keys."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from burnish.utils.errors import BatchError


@dataclass
class DataProtoItem:
    """One row of a :class:`DataProto`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class Rows(ABC):
    """The part of :class:`~burnish.protocol.DataProto` that chooses, repeats and cuts rows."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _map_rows(
        self, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_array: Callable[[np.ndarray], np.ndarray]
    ) -> Self:
        """The batch whose keys are what the functions make of this one's; both choose the same rows."""

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Any) -> Self: ...

    def __getitem__(self, item: Any) -> Self | DataProtoItem:
        """An int gives a :class:`DataProtoItem`; a slice, list, array or tensor (indices or mask) a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list) or (isinstance(item, (np.ndarray, torch.Tensor)) and item.ndim):
            return self.select_idxs(item)
        index = int(item)
        if not -len(self) <= index < len(self):
            raise IndexError(f"Row {index} is asked for, but the batch has {len(self)} rows.")
        row = None if self.batch is None else self.batch[index]
        return DataProtoItem(row, {key: values[index] for key, values in self.non_tensor_batch.items()}, self.meta_info)

    def select_idxs(self, idxs: torch.Tensor | np.ndarray | Sequence[int] | Sequence[bool]) -> Self:
        """The rows at ``idxs``, in that order and as often as named; or the rows where a boolean mask is true.

        Raises:
            BatchError: a mask of another length.
            IndexError: no such row.
        """
        index = torch.as_tensor(idxs).cpu() if len(idxs) else torch.zeros(0, dtype=torch.int64)
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise BatchError(f"A mask of length {len(index)} cannot select from {len(self)} rows.")
            index = index.nonzero().squeeze(-1)
        index = index.to(torch.int64)
        if len(index) and not -len(self) <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(f"Rows {int(index.min())} to {int(index.max())} are asked for, there are {len(self)}.")
        index = index % max(len(self), 1)
        positions = index.numpy()
        return self._map_rows(lambda tensor: tensor[index.to(tensor.device)], lambda values: values[positions])

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step`` as views of this batch (copies if ``step`` is negative)."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(list(range(len(self)))[rows])
        return self._map_rows(lambda tensor: tensor[rows], lambda values: values[rows])

    def reorder(self, indices: torch.Tensor | np.ndarray | Sequence[int]) -> None:
        """Puts the rows, in place, into the order ``indices``: row ``i`` becomes what row ``indices[i]`` was.

        Raises:
            BatchError: ``indices`` is no permutation of the rows.
        """
        if sorted(int(index) for index in indices) != list(range(len(self))):
            raise BatchError(f"reorder needs each of the {len(self)} rows exactly once; select_idxs takes any rows.")
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row ``repeat_times`` times: ``a a b b`` if interleaved, else ``a b a b``."""
        index = torch.arange(len(self))
        return self.select_idxs(index.repeat_interleave(repeat_times) if interleave else index.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Row ``i`` ``repeat_times[i]`` times, copies next to each other.

        Raises:
            BatchError: not one number a row.
        """
        times = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        if times.shape != (len(self),):
            raise BatchError(f"sample_level_repeat needs a number for each of {len(self)} rows, not {len(times)}.")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` batches of equal size, as views.

        Raises:
            BatchError: the rows do not divide; :func:`pad_dataproto_to_divisor` adds some.
        """
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"{len(self)} rows cannot be cut into {chunks} equal chunks. "
                f"pad_dataproto_to_divisor(data, {chunks}) adds rows that unpad_dataproto removes."
            )
        size = len(self) // chunks
        return [self.slice(index * size, (index + 1) * size) for index in range(chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Batches of ``split_size`` rows, as views; the last may have fewer.

        Raises:
            BatchError: ``split_size`` is not positive.
        """
        if split_size < 1:
            raise BatchError(f"A batch cannot be split into parts of {split_size} rows.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches, ``epochs`` times over; ``dataloader_kwargs={"shuffle": True}`` orders each epoch anew.

        The order is a function of ``seed`` alone (0 if ``None``); the global generator is neither read nor advanced.

        Raises:
            BatchError: the rows do not divide into mini-batches.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(f"{len(self)} rows cannot be cut into mini-batches of {mini_batch_size} rows.")
        generator = torch.Generator().manual_seed(seed or 0)
        rows = range(len(self))
        loader: Iterable[Self] = ()
        if len(self):
            loader = DataLoader(
                rows,  # type: ignore[arg-type]
                batch_size=mini_batch_size,
                collate_fn=self.select_idxs,
                generator=generator,
                **(dataloader_kwargs or {}),
            )
        return itertools.chain.from_iterable(loader for _ in range(epochs))


AnyRows = TypeVar("AnyRows", bound=Rows)


def pad_dataproto_to_divisor(data: AnyRows, size_divisor: int) -> tuple[AnyRows, int]:
    """Adds copies of the first rows, in turn, until ``size_divisor`` divides the number of rows.

    Returns:
        The batch (the same object if nothing was needed, or if it has no rows to copy) and the number of added rows.
    """
    pad_size = -len(data) % size_divisor
    if not pad_size or not len(data):
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: AnyRows, pad_size: int) -> AnyRows:
    """Removes the last ``pad_size`` rows: undoes :func:`pad_dataproto_to_divisor`."""
    return data.slice(0, len(data) - pad_size) if pad_size else data
