"""The few collective operations an engine needs, doing nothing on one rank."""

import datetime
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from burnish.utils.errors import BurnishError

# Gradients are all-reduced in buckets of this many elements: large enough for bandwidth, small beside the model.
_BUCKET_ELEMENTS = 1 << 25


def world_size() -> int:
    """Ranks that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def groups(of_ranks: Sequence[Sequence[int]], device_type: str) -> dist.ProcessGroup:
    """Makes a process group of each list of ranks; all ranks call it with the same lists, of which each has one rank once.

    torch gives a new group a time limit of its own, whatever the one of the default group is; here it gets that one. A list
    of all ranks is the default group.

    Returns:
        the group of this rank.
    """
    default = dist.group.WORLD
    assert default is not None
    if len(of_ranks) == 1:
        return default
    group, _ = dist.new_subgroups_by_enumeration(
        [list(each) for each in of_ranks], timeout=time_limit(default, device_type)
    )
    return group


def make_device_mesh(device_type: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """All ranks as a mesh, as torch's `init_device_mesh` makes it: ranks of the last dimension are neighbours."""
    mesh = torch.arange(world_size()).view(*shape)
    made = [groups(mesh.movedim(axis, -1).reshape(-1, size).tolist(), device_type) for axis, size in enumerate(shape)]
    if len(made) == 1:
        return DeviceMesh.from_group(made[0], device_type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(made, device_type, mesh=mesh, mesh_dim_names=tuple(names))


def time_limit(group: dist.ProcessGroup, device_type: str) -> datetime.timedelta | None:
    """After which a collective of ``group`` fails; None where its backend does not say."""
    # Of the backend for this device: a group may have one for each kind.
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def barrier() -> None:
    """Waits for all ranks."""
    if world_size() > 1:
        dist.barrier()


def raise_everywhere(error: BurnishError | None) -> None:
    """Raises the first rank's error on all ranks: one that went on would wait for the others for ever."""
    errors: list[BurnishError | None] = [error]
    if world_size() > 1:
        errors = [None] * world_size()
        # By its text alone: what caused it may not travel.
        dist.all_gather_object(errors, None if error is None else type(error)(str(error)))
    if error is not None:
        raise error
    for told in errors:
        if told is not None:
            raise told


def all_reduce_numbers(numbers: list[float], op: str, device: torch.device) -> list[float]:
    """Element-wise "sum" or "max" of Python numbers over the ranks, exact for counts below 2^53."""
    if world_size() == 1 or not numbers:
        return numbers
    # An accelerator's backend cannot reduce CPU tensors.
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return tensor.tolist()


def merge_metrics(metrics: dict[str, float], *, speaks: bool = True) -> dict[str, float]:
    """Metrics of the whole step from each rank's share: sums, but maximum and minimum for names that end so.

    Ranks may know different names: a rank whose rows all pad the dispatch has none.

    Args:
        speaks: whether this rank's share counts; of ranks with the same rows one does.
    """
    if world_size() == 1:
        return metrics
    shares: list[dict[str, float]] = [{}] * world_size()
    dist.all_gather_object(shares, metrics if speaks else {})
    merged: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            merged[name] = combine(name, merged[name], value) if name in merged else value
    return merged


def combine(name: str, a: float, b: float) -> float:
    """Two shares of the metric ``name`` as one."""
    if name.endswith("_max"):
        return max(a, b)
    if name.endswith("_min"):
        return min(a, b)
    return a + b


class AllRanks:
    """Sums and values of all ranks' rows, for what a loss decides over a whole mini-batch.

    It is a `burnish.core_algos.collectives.Collective`. All ranks call each method together, also one without a value.

    Args:
        device: where the ranks' tensors meet; an accelerator's backend takes no others.
        speaks: whether this rank's values count; of ranks with the same rows one does, and all get the result.
    """

    def __init__(self, device: torch.device, *, speaks: bool = True) -> None:
        self.device = device
        self.speaks = speaks

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks, in float64, on the device of ``values``."""
        total = values.detach().to(self.device, torch.float64, copy=True)
        if not self.speaks:
            total.zero_()
        if world_size() > 1:
            dist.all_reduce(total)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """The one-dimensional ``values`` of all ranks behind each other, rank by rank; lengths may differ."""
        if world_size() == 1:
            return values
        mine = values.detach().to(self.device)
        mine = mine if self.speaks else mine[:0]
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(world_size())]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=self.device))
        sizes = torch.cat(lengths).tolist()
        # Collectives take equal shapes.
        padded = mine.new_zeros(max(sizes))
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(values.device)


def average_(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor by its mean over the ranks, bucket by bucket."""
    if world_size() == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > _BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            _average_bucket(bucket)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        _average_bucket(bucket)


def _average_bucket(bucket: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    flat /= world_size()
    for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(mean.view_as(tensor))
