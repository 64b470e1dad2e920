"""State that lies on the CPU between its uses: weights, masters and an optimizer's moments.

A tensor that leaves keeps its object and its storage; only the storage's memory is given back and comes again. So
everything that refers to it (an optimizer, views, a shard that FSDP2 gathers from) finds it again where it was. The
copies lie in pinned CPU memory that is taken once, and travel on streams of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burnish.utils.transfers import Transfers

# Where a CPU copy frees memory of another kind. A CPU's own state has nowhere to go.
_DEVICES = {"cuda"}
# A smaller tensor costs more to send than its memory is worth.
_LEAST_BYTES = 32 << 10
# Masters and moments come to the device in groups of about this many bytes: few enough that three groups are small beside
# the model, large enough for the bus.
_BUCKET_BYTES = 256 << 20


def can_offload(device: torch.device) -> bool:
    """Whether state of ``device`` can lie on the CPU instead."""
    return device.type in _DEVICES


class HostGroup:
    """Tensors that leave the device together and come back together.

    Args:
        tensors: on the device; views of one storage count once. Small ones stay, and storages that cannot be emptied.
    """

    def __init__(self, tensors: Iterable[Tensor], transfers: Transfers) -> None:
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self.key = tuple(sorted(storages))
        self._storages = [s for s in storages.values() if s.resizable() and s.nbytes() >= max(1, _LEAST_BYTES)]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._transfers = transfers
        self._buffers: list[Tensor] | None = None
        self._left: Any = None
        self._arrived: Any = None
        self.is_away = False

    @property
    def num_bytes(self) -> int:
        """Bytes that leave."""
        return sum(self._sizes)

    @torch.no_grad()
    def leave(self, *, changed: bool = True) -> None:
        """Gives the memory of the device back.

        Args:
            changed: whether the tensors differ from the CPU's copies; where they do not, nothing is copied.
        """
        if self.is_away:
            return
        self.wait()
        transfers = self._transfers
        if self._buffers is None:
            self._buffers = [transfers.host_buffer(size) for size in self._sizes]
            changed = True
        if changed:
            with transfers.on(transfers.out):
                for storage, buffer in zip(self._storages, self._buffers, strict=True):
                    data = _bytes_of(storage)
                    buffer.copy_(data, non_blocking=True)
                    if transfers.has_streams:
                        # The allocator may hand the memory out again only when the copy is done.
                        data.record_stream(transfers.out)
            self._left = transfers.mark(transfers.out)
        for storage in self._storages:
            storage.resize_(0)
        self.is_away = True

    @torch.no_grad()
    def fetch(self) -> None:
        """Starts the way back; `wait` before the first use."""
        if not self.is_away:
            return
        assert self._buffers is not None
        transfers = self._transfers
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        transfers.wait(self._left, transfers.back)
        with transfers.on(transfers.back):
            for storage, buffer in zip(self._storages, self._buffers, strict=True):
                _bytes_of(storage).copy_(buffer, non_blocking=True)
        self._arrived = transfers.mark(transfers.back)
        self.is_away = False

    def wait(self) -> None:
        """Lets the current stream go on only when the tensors have arrived."""
        self._transfers.wait(self._arrived)
        self._arrived = None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


class WeightOffload:
    """Weights that lie on the CPU between their uses.

    Args:
        parts: (module, tensors) in the order in which the model uses them. A module waits for its own tensors only, so that
            it computes while those behind it still travel.
    """

    def __init__(self, parts: Sequence[tuple[nn.Module, Sequence[Tensor]]], transfers: Transfers) -> None:
        self._groups = [HostGroup(tensors, transfers) for _, tensors in parts]
        for (module, _), group in zip(parts, self._groups, strict=True):
            # In front of every other hook: FSDP2's reads the tensors.
            module.register_forward_pre_hook(lambda _module, _inputs, group=group: group.wait(), prepend=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that leave."""
        return sum(group.num_bytes for group in self._groups)

    def fetch(self, *, wait: bool) -> None:
        """Brings the weights back.

        Args:
            wait: for a use that does not go through the modules.
        """
        for group in self._groups:
            group.fetch()
        if wait:
            for group in self._groups:
                group.wait()

    def leave(self, *, changed: bool) -> None:
        """Sends the weights to the CPU."""
        for group in self._groups:
            group.leave(changed=changed)


class StepOffload:
    """What only an optimizer's step needs: masters and moments, on the CPU at all other times.

    A step visits the parameters bucket by bucket. The next bucket comes while one is updated, and the one before leaves.

    Args:
        masters: of every trained parameter, by name.
        moments_of: the tensors that the optimizer keeps for a parameter, by its name; none before its first step.
        masters_leave, moments_leave: which of the two are on the CPU between steps.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        moments_of: Callable[[str], list[Tensor]],
        transfers: Transfers,
        *,
        masters_leave: bool,
        moments_leave: bool,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._masters = masters
        self._moments_of = moments_of
        self._transfers = transfers
        self._masters_leave = masters_leave
        self._moments_leave = moments_leave
        self._buckets = _buckets(masters, bucket_bytes)
        self._groups: list[HostGroup | None] = [None] * len(self._buckets)

    def visit(self) -> Iterator[list[str]]:
        """Names of parameters whose masters and moments are on the device until the next names are asked for."""
        last = len(self._buckets) - 1
        self._fetch(0)
        for index, names in enumerate(self._buckets):
            if index < last:
                self._fetch(index + 1)
            self._wait(index)
            yield names
            self._leave(index)

    def fetch(self) -> None:
        """Brings everything to the device, for a use outside a step."""
        for index in range(len(self._buckets)):
            self._fetch(index)
        for index in range(len(self._buckets)):
            self._wait(index)

    def leave(self) -> None:
        """Sends everything to the CPU; whoever has replaced a tensor calls it too."""
        for index in range(len(self._buckets)):
            self._leave(index)

    def _fetch(self, index: int) -> None:
        if self._buckets and (group := self._groups[index]) is not None:
            group.fetch()

    def _wait(self, index: int) -> None:
        if (group := self._groups[index]) is not None:
            group.wait()

    def _leave(self, index: int) -> None:
        group = self._groups[index]
        if group is not None and group.is_away:
            return
        names = self._buckets[index]
        masters = [self._masters[name] for name in names] if self._masters_leave else []
        moments = [tensor for name in names for tensor in self._moments_of(name)] if self._moments_leave else []
        on_device = [tensor for tensor in (*masters, *moments) if tensor.device.type == self._transfers.device.type]
        if not on_device:
            return
        fresh = HostGroup(on_device, self._transfers)
        if group is None or group.key != fresh.key:
            # The first step made the moments, or a checkpoint replaced them.
            self._groups[index] = group = fresh
        group.leave()


def _buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a bucket would have more than ``bucket_bytes``; one large tensor may be alone in it."""
    buckets: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        if not buckets or size + tensor.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += tensor.nbytes
    return buckets
