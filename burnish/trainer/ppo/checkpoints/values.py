"""Values of a trainer's state as JSON and back, to the bit: tensors, arrays, tuples and bytes too. No pickle."""

import base64
from typing import Any

import numpy as np
import torch

_KIND = "__kind__"


def to_json(value: Any) -> Any:
    """``value`` as dicts, lists, texts, numbers and null.

    Raises:
        TypeError: a value of another kind, named with its place.
    """
    return _encoded(value, "state")


def _encoded(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        # A number of numpy's that is a float too would be written as one; its kind does not come back.
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return {
                _KIND: "tensor",
                "dtype": "bfloat16",
                "value": _encoded(value.detach().float().cpu().numpy(), place),
            }
        return {_KIND: "tensor", "value": _encoded(value.detach().cpu().numpy(), place)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple | list):
        entries = [_encoded(entry, f"{place}[{i}]") for i, entry in enumerate(value)]
        return {_KIND: "tuple", "value": entries} if isinstance(value, tuple) else entries
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value) and _KIND not in value:
            return {name: _encoded(entry, f"{place}.{name}") for name, entry in value.items()}
        pairs = [[_encoded(name, place), _encoded(entry, f"{place}[{name!r}]")] for name, entry in value.items()]
        return {_KIND: "dict", "value": pairs}
    raise TypeError(f"{place} is {type(value).__name__}, which a checkpoint cannot hold")


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {name: from_json(entry) for name, entry in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "array":
        data = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        return data.reshape(value["shape"]).copy()
    if kind == "tensor":
        tensor = torch.from_numpy(from_json(value["value"]))
        return tensor.bfloat16() if value.get("dtype") == "bfloat16" else tensor
    if kind == "tuple":
        return tuple(from_json(entry) for entry in value["value"])
    if kind == "dict":
        return {from_json(name): from_json(entry) for name, entry in value["value"]}
    raise ValueError(f"a value of the kind {kind!r} is not known")
