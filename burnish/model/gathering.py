"""Reading rows of a tensor where they are wanted, some more than once, with a gradient that is the same every time."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.model.kernels.place import has_kernel


class _Gather(torch.autograd.Function):
    """``x.index_select(0, index)``; the backward adds copies up in float32 and in one order, without atomic adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: "Gathering") -> Tensor:
        ctx.gathering = gathering
        return x.index_select(0, gathering.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.gathering.add_up(grad), None


class Gathering:
    """Reads rows of a tensor, some of them more than once; differentiable, deterministic on every device.

    Args:
        index: int64 [places] on the CPU, the row that each place reads.
        num_rows: rows of what is read.
        counts: bool [places]; false on places whose gradient is zero, which are then not looked at. None: all count.

    Attributes:
        index, index_on_host: on the device, and as given.
        places, ends: the places that read each row, one row after the other, and where those of each row begin and end.
    """

    def __init__(
        self, index: Tensor, num_rows: int, *, counts: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.num_rows = num_rows
        places = torch.arange(len(index)) if counts is None else counts.nonzero()[:, 0]
        read = index if counts is None else index[places]
        self.is_identity = len(index) == num_rows and bool((index == torch.arange(num_rows)).all())
        self._copies = torch.bincount(read, minlength=num_rows)
        # The places of each row, next to each other. A stable sort, so that the order of addition is that of the places.
        is_sorted = bool((read[1:] >= read[:-1]).all())
        self._places = places if is_sorted else places[torch.sort(read, stable=True).indices]
        self._ends = F.pad(self._copies.cumsum(0), (1, 0))
        self.index_on_host = index
        self.index, self.places, self.ends = to_device([index, self._places, self._ends], device)
        self._parts: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [places, ...]."""
        gathered = x if self.is_identity else _Gather.apply(x, self)
        assert isinstance(gathered, Tensor)
        return gathered

    def add_up(self, grad: Tensor) -> Tensor:
        """[places, ...] -> [rows, ...], the sum over the places that read each row."""
        if has_kernel(grad):
            from burnish.model.kernels.gpu import gather

            return gather.add_up(grad, self.places, self.ends)
        parts = self._by_number_of_copies
        if len(parts) == 1 and len(parts[0][0]) == self.num_rows:
            return self._sum(grad, parts[0][1])
        total = grad.new_zeros((self.num_rows, *grad.shape[1:]))
        for rows, places in parts:
            total.index_copy_(0, rows, self._sum(grad, places))
        return total

    @staticmethod
    def _sum(grad: Tensor, places: Tensor) -> Tensor:
        """Over the copies: [copies, rows] places -> [rows, ...]."""
        copies = grad.index_select(0, places.flatten())
        if len(places) == 1:
            return copies
        wide = torch.promote_types(grad.dtype, torch.float32)
        return copies.unflatten(0, places.shape).sum(0, dtype=wide).to(grad.dtype)

    @property
    def _by_number_of_copies(self) -> list[tuple[Tensor, Tensor]]:
        """(rows, [copies, rows] places) for each number of copies that there is."""
        if self._parts is None:
            self._parts = []
            for number in self._copies.unique().tolist():
                if number:
                    rows = (self._copies == number).nonzero()[:, 0]
                    places = self._places[self._ends[rows] + torch.arange(number)[:, None]]
                    self._parts.append((rows.to(self.index.device), places.to(self.index.device)))
        return self._parts


def to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """int64 tensors on ``device``, in one copy that the host does not wait for."""
    if torch.device(device).type == "cpu":
        return list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory().to(device, non_blocking=True)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
