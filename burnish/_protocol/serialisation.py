"""Tensors as NumPy views for pickle protocol 5, and batches as safetensors files."""

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from burnish.utils.errors import BatchError

# NumPy lacks these; their bits travel as integers of the same size.
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip

_JSON_KEY = "__json__"
_FORMAT = "burnish.DataProto/1"

PickledTensor = tuple[np.ndarray, str]


def to_numpy(tensor: torch.Tensor) -> PickledTensor:
    """A NumPy view of ``tensor`` and the name of its dtype.

    The view shares the tensor's memory if that lies contiguously on the CPU. NumPy hands it to pickle protocol 5 as an
    out-of-band buffer, which Ray writes to its object store without a copy in between.
    """
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in _NUMPY_DTYPES:
        tensor = tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])
    return tensor.numpy(), name


def from_numpy(pickled: PickledTensor) -> torch.Tensor:
    """The tensor of :func:`to_numpy`, sharing the array's memory, also when that is read-only."""
    array, name = pickled
    dtype = getattr(torch, name)
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    if array.flags.writeable:
        return torch.from_numpy(array).view(dtype)
    # torch knows no read-only tensors and warns about every such array; this alias is silent and keeps its owner alive.
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype).view(array.shape)


def write(
    path: str | os.PathLike,
    tensors: dict[str, torch.Tensor],
    num_rows: int | None,
    non_tensor_batch: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> None:
    """Writes one safetensors file; what is no tensor is in it as UTF-8 JSON. The file appears whole or not at all.

    Raises:
        BatchError: a value that JSON would not give back as it was, naming its key.
    """
    if _JSON_KEY in tensors:
        raise BatchError(f"The batch key {_JSON_KEY!r} is taken by the file format. Rename it before saving.")
    document = {
        "format": _FORMAT,
        "num_rows": num_rows,
        "tensors": list(tensors),
        "non_tensor_batch": {
            key: [_as_json(value, f"non_tensor_batch[{key!r}][{row}]") for row, value in enumerate(values.tolist())]
            for key, values in non_tensor_batch.items()
        },
        "meta_info": _as_json(meta_info, "meta_info"),
    }
    encoded = np.frombuffer(bytearray(json.dumps(document).encode()), dtype=np.uint8)
    # safetensors refuses tensors that share memory, as the columns of one batch may.
    stored = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    stored[_JSON_KEY] = torch.from_numpy(encoded)
    partial = Path(f"{os.fspath(path)}.partial-{os.getpid()}")
    try:
        save_file(stored, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file of :func:`write`, and its document: num_rows, non_tensor_batch (lists) and meta_info.

    Raises:
        BatchError: the file is missing, damaged or of another kind.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise BatchError(f"{os.fspath(path)} cannot be read as a saved DataProto: {error}.") from error
    encoded = tensors.pop(_JSON_KEY, None)
    document = json.loads(encoded.numpy().tobytes()) if encoded is not None else {}
    if document.get("format") != _FORMAT:
        raise BatchError(f"{os.fspath(path)} is a safetensors file, but not one that DataProto.save_to_disk wrote.")
    # safetensors orders tensors by alignment and name.
    return {key: tensors[key] for key in document["tensors"]}, document


def _as_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _as_json(value.item(), where)
    if isinstance(value, list):
        return [_as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = "a dict whose keys are not all strings" if isinstance(value, dict) else f"of type {type(value).__name__}"
    raise BatchError(
        f"{where} is {kind}, which JSON cannot give back as it was, so it cannot be saved. "
        f"Turn it into numbers, strings, lists and dicts with string keys, or drop the key with select()."
    )
