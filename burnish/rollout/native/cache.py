"""Keys and values of running sequences: one row of every layer's buffer for each slot."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from burnish.rollout.native.scheduler import Move

_LENGTH_STEP = 64


class SlotCache:
    """A key and a value buffer [slots, length, heads, head_dim] for each layer, made when the layer first stores.

    Buffers grow along both axes when `reserve` asks for more, and keep their size until `free`. They start as zeros: a
    masked place has weight 0, and 0 times a NaN left in memory would still be NaN.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.num_slots = 0
        self.length = 0
        self._max_length = 0

    def begin(self, num_slots: int, max_length: int) -> None:
        """Nothing that is stored is needed any more, and what follows fits into ``num_slots`` x ``max_length``.

        Buffers are kept if they are large enough, or may still grow without passing that size.
        """
        large_enough = self.num_slots >= num_slots and self.length >= max_length
        if not large_enough and (self.num_slots > num_slots or self.length > max_length):
            self.free()
        self._max_length = max_length
        # All slots at once: a slot axis that grew with every prefill would be copied every time.
        self.reserve(num_slots, 1)

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for ``num_slots`` sequences of ``length`` tokens; what is stored stays."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        if length > self.length:
            # By half at least, so that a growing sequence copies the cache a logarithmic number of times.
            grown = max(length, self.length + self.length // 2)
            grown = -(-grown // _LENGTH_STEP) * _LENGTH_STEP
            length = max(length, min(grown, self._max_length))
        self.num_slots, self.length = max(num_slots, self.num_slots), max(length, self.length)
        for buffers in (self._keys, self._values):
            for layer, old in buffers.items():
                buffers[layer] = old.new_zeros(self.num_slots, self.length, *old.shape[2:])
                buffers[layer][: old.shape[0], : old.shape[1]] = old

    def store(self, layer: int, slots: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes one token a row: row i into slot ``slots[i]`` at place ``positions[i]``.

        Args:
            slots, positions: int64 [rows].
            key, value: [rows, heads, head_dim].
        """
        if layer not in self._keys:
            self._keys[layer] = key.new_zeros(self.num_slots, self.length, *key.shape[1:])
            self._values[layer] = value.new_zeros(self.num_slots, self.length, *value.shape[1:])
        self._keys[layer][slots, positions] = key
        self._values[layer][slots, positions] = value

    def view(self, layer: int, num_slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [num_slots, heads, length, head_dim] of the first slots, without a copy."""
        key, value = self._keys[layer][:num_slots, :length], self._values[layer][:num_slots, :length]
        return key.transpose(1, 2), value.transpose(1, 2)

    def move(self, moves: Sequence[Move], length: int) -> None:
        """Copies the first ``length`` tokens of each source slot to its target slot."""
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                buffer[targets, :length] = buffer[sources, :length]

    def free(self) -> None:
        """Gives all memory back."""
        self._keys.clear()
        self._values.clear()
        self.num_slots = self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffers in (self._keys, self._values) for buffer in buffers.values())


def bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Cache bytes of one token in all layers, from the model's configuration."""
    text = config.get_text_config(decoder=True)
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * num_heads * head_dim * dtype.itemsize


def memory_budget(device: torch.device, fraction: float, model: nn.Module, held: int) -> int:
    """Bytes that the cache may take: ``fraction`` of the device's memory, less the model's weights.

    ``held`` are the bytes that the cache has already; they count as free.

    On a GPU never more than nine tenths of what is free now. On a CPU only of the machine's size, so that two runs on
    one machine decide alike.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What PyTorch holds without using it is free to us.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) + held
        return int(min(fraction * total - weights, 0.9 * free))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(fraction * total - weights)
