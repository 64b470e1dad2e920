"""Fingerprints of tensors: whether what arrived is what was sent, to the last bit, without sending it twice."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

# Words of a part that is looked at in one go. What is made beside the tensor is 12 bytes a word: on a GPU less than 64 MiB, on
# a CPU what its cache holds.
_WORDS = {"cuda": 1 << 22, "cpu": 1 << 15}
# Odd, so that it can be undone: no information is lost.
_SPREAD = 0x1E3779B97F4A7C15


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """A number (int64, on the tensor's device) that depends on every bit of ``tensor`` and its place; shape and dtype aside.

    With x_i the i-th four bytes as a signed number it is ``c sum_i (2 i + 1) x_i`` modulo 2^64, an exact sum in whatever order.
    One changed word, and two words that changed places, always change it.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = _words(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if len(words) == 0:
        return total
    size = min(len(words), _WORDS.get(flat.device.type, 1 << 22))
    odd = torch.arange(1, 2 * size, 2, device=flat.device)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        total += (part * odd[: len(part)]).sum()
        if start:
            total += part.sum(dtype=torch.int64) * (2 * start)
    return total * _SPREAD


def _words(flat: Tensor) -> Tensor:
    """Four bytes of ``flat`` [numbers] at a time, as int32; zero bytes fill up the last word."""
    size = flat.element_size()
    each = max(1, 4 // size)
    if len(flat) % each:
        flat = torch.cat([flat, flat.new_zeros(each - len(flat) % each)])
    if flat.storage_offset() * size % 4:
        # A view may begin in the middle of a word.
        flat = flat.clone()
    return flat.view(torch.int32)


class Fingerprints:
    """The fingerprints of named tensors, which stay on their devices until they are asked for."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes down that of ``tensor``."""
        self._values[name] = fingerprint(tensor)

    def read(self) -> dict[str, int]:
        """All of them by name; waits for the device once."""
        if not self._values:
            return {}
        return dict(zip(self._values, torch.stack(list(self._values.values())).tolist(), strict=True))


def combined(fingerprints: Mapping[str, int]) -> str:
    """One short text for all of them; the order does not matter."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fingerprints):
        digest.update(f"{name}={fingerprints[name]}\n".encode())
    return digest.hexdigest()
