"""Keys and values of running sequences in blocks that a block table joins: one key and one value buffer for each layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

SCRATCH_BLOCK = 0
"""Never given to a sequence: rows that only fill up a captured batch write their key and value there."""


LAYOUT_SIZE = 9
"""Numbers that say where one layer's keys and values are."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores of a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class PagedCache:
    """For each layer a key and a value buffer [num_blocks, block_size, num_kv_heads, dim].

    The memory is given back by `free` and comes back at other addresses. Kernels inside a captured graph therefore read
    ``addresses``, a tensor that itself stays where it is; everything else uses `key` and `value`.

    Buffers start as zeros: a masked place has weight 0, and 0 times a NaN left in memory would still be NaN. On a CPU
    they are zero pages of the system, which take memory only once they are written.

    Args:
        heads_first: the keys of one head and block lie together in memory, as products of whole blocks like it (on a
            CPU); the buffers are then views with their axes in the order above. Kernels need False.

    Attributes:
        addresses: int64 [layers, 2] on the device, where each layer's keys and values begin; zeros while nothing is allocated.
        layouts: int64 [layers, LAYOUT_SIZE] on the host, for compiled kernels: address and strides (block, token, head) of a
            layer's keys, the same of its values, and the block size.
        num_blocks: blocks that exist now, the scratch block included; 0 after `free`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        *,
        heads_first: bool = False,
    ) -> None:
        self._heads_first = heads_first
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self.num_blocks = 0
        self.addresses = torch.zeros(len(self.layers), 2, dtype=torch.int64, device=device)
        self.layouts = torch.zeros(len(self.layers), LAYOUT_SIZE, dtype=torch.int64)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers."""
        return self.dtype.itemsize * sum(
            layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def allocate(self, num_blocks: int) -> None:
        """Makes ``num_blocks`` empty blocks, in place of those that there are."""
        self.free()
        self.num_blocks = num_blocks
        for layer in self.layers:
            self._keys.append(self._zeros(num_blocks, layer.num_kv_heads, layer.key_dim))
            self._values.append(self._zeros(num_blocks, layer.num_kv_heads, layer.value_dim))
        pairs = [(key.data_ptr(), value.data_ptr()) for key, value in zip(self._keys, self._values, strict=True)]
        self.addresses.copy_(torch.tensor(pairs, dtype=torch.int64))
        both = zip(self._keys, self._values, strict=True)
        rows = [[k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3], self.block_size] for k, v in both]
        self.layouts.copy_(torch.tensor(rows, dtype=torch.int64))

    def key(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, key_dim]."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, value_dim]."""
        return self._values[layer]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int | None = None) -> None:
        """Copies blocks in all layers, or their first ``num_tokens`` tokens; no target is also a source."""
        if not len(sources):
            return
        source, target = (torch.tensor(list(blocks), device=self.device) for blocks in (sources, targets))
        end = self.block_size if num_tokens is None else num_tokens
        for buffer in (*self._keys, *self._values):
            buffer[target, :end] = buffer[source, :end]

    def free(self) -> None:
        """Gives all memory back."""
        self._keys, self._values = [], []
        self.num_blocks = 0
        self.addresses.zero_()

    def _zeros(self, num_blocks: int, num_heads: int, dim: int) -> Tensor:
        if self._heads_first:
            return self._zero_memory((num_blocks, num_heads, self.block_size, dim)).transpose(1, 2)
        return self._zero_memory((num_blocks, self.block_size, num_heads, dim))

    def _zero_memory(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # torch would write zeros into every page; numpy asks for huge pages, which the system may have to make first.
        memory = mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)
