"""Safetensors files, written tensor by tensor: what is written never lies in memory a second time.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the header, the header in JSON,
which gives each tensor's dtype, shape and place, and the tensors' bytes behind each other.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.utils import progress

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The system takes no more at once than 2 GiB, and other threads get their turn between two pieces.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """What the header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """Of ``tensor``, which may lie on the meta device."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_tensors(
    path: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file and waits until the disk has it.

    Args:
        specs: of every tensor, by name.
        tensors: the same names in any order, each on any device. One at a time is brought to the CPU.
        metadata: texts in the header.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    header, places = _header(specs, metadata)
    missing = set(specs)
    # Through a descriptor of our own: what is written can be waited for before the file is closed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_at(descriptor, header, 0)
        for name, tensor in tensors:
            if Spec.of(tensor) != specs[name]:
                raise ValueError(f"{name!r} was announced as {specs[name]} and is {Spec.of(tensor)}")
            missing.remove(name)
            if tensor.numel():
                plain = tensor.detach().to("cpu").contiguous()
                _write_at(descriptor, _bytes_of(plain), len(header) + places[name])
        if missing:
            raise ValueError(f"{sorted(missing)[0]!r} was announced and did not come")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where behind it each tensor starts."""
    said: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    places, end = {}, 0
    # Wide numbers first, so that every tensor lies at a multiple of its numbers' size.
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        places[name] = end
        said[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(said, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _bytes_of(plain: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive it."""
    # Not by numpy: a storage that has been an array's can no longer give its memory back (`burnish.engine.offload`).
    return memoryview((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())).cast("B")


def _write_at(descriptor: int, data: bytes | memoryview, position: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + _PIECE_BYTES], position + done)
        progress.tick()
