"""What the backward of each block finds: everything the forward saved, its input alone, or either of them on the CPU."""

import importlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from burnish.model.attention import ATTENTION_NAME, burnish_attention
from burnish.model.dense import SameForward
from burnish.model.policy import transformer_blocks
from burnish.utils.transfers import Transfers

# A tensor below this size is not worth a copy of its own.
_LEAST_BYTES = 64 << 10


class BlockActivations:
    """Recomputes the activations of the first ``num_recomputed`` blocks, and moves what is kept to the CPU if asked to.

    The forward of each block is wrapped, not its call: hooks, as those of FSDP2, stay outside and run once. Without
    gradients, or in evaluation, the blocks are as they were.

    Args:
        blocks: in the order in which the model calls them.
        offload: keeps on the CPU what the blocks save.
        compiled: compiles their forwards, for any number of tokens.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], *, offload: "ActivationOffload | None" = None, compiled: bool = False
    ) -> None:
        self.num_blocks = len(blocks)
        self.num_recomputed = 0
        self.offload = offload
        if compiled:
            _load_setuptools()
            # Attention stays outside: it holds the lengths of a batch, which compilation would take for constants. So blocks
            # of one shape share what is compiled, whatever their place in the model.
            AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(burnish_attention))
        for index, block in enumerate(blocks):
            forward = torch.compile(block.forward, dynamic=True) if compiled else block.forward
            block.forward = ManagedForward(block, index, forward, self)  # type: ignore[assignment]

    def end_forward(self) -> None:
        """The model's forward is over: memory that was only held for its copies is free."""
        if self.offload is not None:
            self.offload.end_forward()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Makes all blocks keep only their inputs in training and compute the rest again in the backward."""
    activations = BlockActivations(transformer_blocks(model))
    activations.num_recomputed = activations.num_blocks


def _load_setuptools() -> None:
    """Imports setuptools, as torch's compiler will, in a way that works whatever the process has imported before.

    On Python 3.11 its import asserts that ``distutils`` is its own copy; but once anything has looked for pip, if only by
    ``find_spec``, the finder of that copy stands aside. After the import neither matters.
    """
    if "setuptools" in sys.modules or find_spec("setuptools") is None:
        return
    finder = getattr(sys.modules.get("_distutils_hack"), "DISTUTILS_FINDER", None)
    if finder is not None:
        # The finder stands aside by an attribute that hides its method.
        vars(finder).pop("spec_for_distutils", None)
    importlib.import_module("setuptools")


class ManagedForward(SameForward):
    """The forward of a block, with what its backward finds decided by ``activations``."""

    def __init__(self, block: nn.Module, index: int, forward: Any, activations: BlockActivations) -> None:
        self.block = block
        self.index = index
        self.forward = forward
        self.activations = activations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block's own forward gives."""
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        offload = self.activations.offload
        with nullcontext() if offload is None else offload.of_block(self.block, kwargs):
            if self.index < self.activations.num_recomputed:
                # Without reentry, so that keyword arguments and the attention context pass through.
                return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
            return self.forward(*args, **kwargs)


class ActivationOffload:
    """Keeps on the CPU what blocks save for their backward.

    A block's tensors leave while the next block computes, and come back while the backward of the block behind it does.
    Parameters and what the blocks share (rotary embeddings) stay, and so do small tensors.

    Args:
        transfers: streams of the device.
        least_bytes: smaller tensors stay.
    """

    def __init__(self, transfers: Transfers, least_bytes: int = _LEAST_BYTES) -> None:
        self._transfers = transfers
        self._least_bytes = least_bytes
        self._last: _BlockCall | None = None
        # Tensors whose copies may still be under way, one entry for each of the last blocks.
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()

    @contextmanager
    def of_block(self, block: nn.Module, kwargs: dict[str, Any]) -> Iterator[None]:
        """Inside, what autograd saves belongs to one call of ``block``."""
        while len(self._leaving) > 1:
            # The memory of the block before the last is used again only behind its copy: two blocks at most are in flight.
            event, _ = self._leaving.popleft()
            self._transfers.wait(event)
        stays = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *_tensors_in(kwargs))}
        call = _BlockCall(self._transfers, before=self._last)
        self._last = call
        sources: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            is_worth_it = tensor.device.type == self._transfers.device.type and storage.nbytes() >= self._least_bytes
            if not is_worth_it or storage._cdata in stays or isinstance(tensor, nn.Parameter):
                return tensor
            # While the source is held its storage's address names it, and views of one storage travel once.
            sources[storage._cdata] = tensor.detach()
            return _Away(call.slot(tensor), tensor)

        with saved_tensors_hooks(pack, _bring_back):
            yield
        if self._transfers.has_streams:
            self._leaving.append((self._transfers.mark(self._transfers.out), list(sources.values())))
        sources.clear()

    def end_forward(self) -> None:
        """The next block that is called belongs to another forward."""
        self._last = None
        while self._leaving:
            self._transfers.wait(self._leaving.popleft()[0])


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in _tensors_in(item))
    elif isinstance(value, tuple | list):
        yield from (tensor for item in value for tensor in _tensors_in(item))


class _Slot:
    """One storage on the CPU and, when its block's turn has come, on the device again."""

    def __init__(self, source: Tensor, call: "_BlockCall") -> None:
        self.call = call
        storage = source.untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
        self.host = call.transfers.host_buffer(storage.nbytes())
        with call.transfers.on(call.transfers.out):
            self.host.copy_(data, non_blocking=True)
        self.on_device: Tensor | None = None

    def fetch(self) -> None:
        """Starts the way back."""
        if self.on_device is None:
            transfers = self.call.transfers
            data = torch.empty(self.host.numel(), dtype=torch.uint8, device=transfers.device)
            with transfers.on(transfers.back):
                data.copy_(self.host, non_blocking=True)
                if transfers.has_streams:
                    data.record_stream(transfers.back)
            self.on_device = data


class _Away:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, slot: _Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.dtype = tensor.dtype
        self.layout = (tensor.storage_offset(), tensor.size(), tensor.stride())


def _bring_back(packed: Any) -> Tensor:
    if not isinstance(packed, _Away):
        return packed
    packed.slot.call.arrive()
    assert packed.slot.on_device is not None
    storage = packed.slot.on_device.untyped_storage()
    return torch.empty(0, dtype=packed.dtype, device=storage.device).set_(storage, *packed.layout)  # type: ignore[call-overload]


class _BlockCall:
    """What one call of one block has saved. A slot lives as long as autograd needs one of its tensors."""

    def __init__(self, transfers: Transfers, before: "_BlockCall | None") -> None:
        self.transfers = transfers
        self._before = before
        self._slots: WeakValueDictionary[int, _Slot] = WeakValueDictionary()
        self._arrived: Any = None
        self._is_fetched = False

    def slot(self, tensor: Tensor) -> _Slot:
        """The place of ``tensor``'s storage; made, and the copy started, when it is the first of its storage."""
        key = tensor.untyped_storage()._cdata
        slot = self._slots.get(key)
        if slot is None:
            self._slots[key] = slot = _Slot(tensor, self)
        return slot

    def fetch(self) -> None:
        """Starts the way back of everything that is still needed."""
        if self._is_fetched:
            return
        transfers = self.transfers
        # In order: what came last to the CPU is on the stream of the ways out before this.
        transfers.wait(transfers.mark(transfers.out), transfers.back)
        for slot in list(self._slots.values()):
            slot.fetch()
        self._arrived = transfers.mark(transfers.back)
        self._is_fetched = True

    def arrive(self) -> None:
        """Everything is back for the current stream, and the block that comes next in the backward is on its way."""
        self.fetch()
        self.transfers.wait(self._arrived)
        if self._before is not None:
            self._before.fetch()
            self._before = None
