"""The trained weights as a stream of whole tensors, for whoever keeps a copy of them: a rollout engine or a checkpoint.

Sharded weights are gathered many at a time: this rank's parts are cast to the compute dtype and laid behind each other, one
all-gather brings everybody's, and the whole tensors are cut out of it. While the caller reads one such bucket the next is on its
way.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from burnish.engine.layout import Layout, persistent_buffers
from burnish.model.lora import hf_name, is_adapter_name

# Newer versions of torch warn of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Of a whole bucket: large enough for bandwidth, small beside a model.
BUCKET_BYTES = 256 << 20


def named_weights(
    layout: Layout, *, bucket_bytes: int = BUCKET_BYTES, adapters_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and whole tensor, in the compute dtype, of every parameter and stored buffer; a tied pair comes once.

    A model with adapters gives its base first, under the names that it has without them, and the adapters after it
    (`burnish.model.lora.hf_name`). Nothing is ever merged.

    Replicated: the compute weights themselves, not copies. Sharded: gathered, so all ranks go through it to the end.

    Args:
        bucket_bytes: of the whole tensors that are gathered at a time; a larger tensor is a bucket of its own.
        adapters_only: leaves out what is not trained.
    """
    parameters = [(name.removeprefix("model."), parameter.detach()) for name, parameter in _named_parameters(layout)]
    adapters = [(name, tensor) for name, tensor in parameters if is_adapter_name(name)]
    if not adapters_only:
        base = [(name, tensor) for name, tensor in parameters if not is_adapter_name(name)]
        yield from _whole(base, layout.dtype, bucket_bytes)
        yield from ((name.removeprefix("model."), buffer) for name, buffer in persistent_buffers(layout.module))
    elif not adapters:
        raise ValueError("adapters_only of a model that has no adapters")
    yield from _whole(adapters, layout.dtype, bucket_bytes)


def weight_shapes(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Name and shape of what `named_weights` gives, in its order, as tensors without memory; nothing is gathered."""
    parameters = [(name.removeprefix("model."), parameter) for name, parameter in _named_parameters(layout)]
    buffers = [(name.removeprefix("model."), buffer) for name, buffer in persistent_buffers(layout.module)]
    base = [(name, tensor) for name, tensor in parameters if not is_adapter_name(name)]
    adapters = [(name, tensor) for name, tensor in parameters if is_adapter_name(name)]
    for name, tensor in (*base, *buffers, *adapters):
        dtype = layout.dtype if isinstance(tensor, DTensor) else tensor.dtype
        yield name, torch.empty(tensor.shape, dtype=dtype, device="meta")


def _named_parameters(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    return ((hf_name(name), parameter) for name, parameter in layout.module.named_parameters())


def _whole(tensors: list[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors as whole ones in ``dtype``, in their order; plain ones are whole already."""
    underway: deque[_Bucket] = deque()
    for bucket in _buckets(tensors, dtype, bucket_bytes):
        bucket.start()
        underway.append(bucket)
        if len(underway) > 1:
            yield from underway.popleft().finish()
    while underway:
        yield from underway.popleft().finish()


@dataclass
class _Bucket:
    """Neighbours of a stream: sharded alike over the ranks of ``group`` and gathered together, or whole (group None)."""

    entries: list[tuple[str, Tensor]]
    dtype: torch.dtype
    group: Any

    def __post_init__(self) -> None:
        self._parts: Tensor | None = None
        self._work: Any = None

    def start(self) -> None:
        """Begins to gather."""
        if self.group is None:
            return
        num_ranks = dist.get_world_size(self.group)
        sizes = [_part_numel(tensor, num_ranks) for _, tensor in self.entries]
        device = _device_of(cast(DTensor, self.entries[0][1]))
        mine = torch.zeros(sum(sizes), dtype=self.dtype, device=device)
        for (_, tensor), part in zip(self.entries, mine.split(sizes), strict=True):
            local = cast(DTensor, tensor).to_local()
            part[: local.numel()].copy_(local.reshape(-1), non_blocking=True)
        self._parts = torch.empty(num_ranks, sum(sizes), dtype=self.dtype, device=device)
        self._work = _all_gather(self._parts.view(-1), mine, group=self.group, async_op=True)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each entry."""
        if self.group is None:
            yield from self.entries
            return
        assert self._parts is not None
        self._work.wait()
        start = 0
        for name, tensor in self.entries:
            numel = _part_numel(tensor, len(self._parts))
            whole = self._parts[:, start : start + numel].reshape(-1)[: tensor.numel()]
            yield name, whole.view(tensor.shape)
            start += numel
        self._parts = None


def _buckets(tensors: list[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[_Bucket]:
    bucket: _Bucket | None = None
    size = 0
    for name, tensor in tensors:
        group = _gather_group(tensor)
        if isinstance(tensor, DTensor) and group is None:
            tensor = cast(DTensor, tensor.to(dtype)).full_tensor()
        num_bytes = tensor.numel() * dtype.itemsize
        if bucket is not None and (bucket.group is not group or size + num_bytes > bucket_bytes):
            yield bucket
            bucket = None
        if bucket is None:
            bucket, size = _Bucket([], dtype, group), 0
        bucket.entries.append((name, tensor))
        size += num_bytes
    if bucket is not None:
        yield bucket


def _gather_group(tensor: Tensor) -> Any:
    """The process group whose ranks hold the rows of ``tensor``; None for a whole tensor, or one that is split otherwise."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1 or tensor.placements[axes[0]] != Shard(0):
        return None
    return tensor.device_mesh.get_group(axes[0])


def _part_numel(tensor: Tensor, num_ranks: int) -> int:
    """Numbers of the largest part of ``tensor``: FSDP gives every rank as many rows, and the last ones what is left."""
    rows = -(-tensor.shape[0] // num_ranks) if tensor.dim() else 1
    return rows * (tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1)


def _device_of(tensor: DTensor) -> torch.device:
    """Where the ranks of ``tensor`` meet: its parts may lie on the CPU between uses."""
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
