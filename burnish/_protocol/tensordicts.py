"""A batch as one TensorDict, in which arrays are stacks of non-tensors and ``meta_info`` single ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from burnish._protocol.joining import object_array
from burnish.utils.errors import BatchError

Parts = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]


def take_apart(tensor_dict: TensorDict) -> Parts:
    """Tensors, non-tensor arrays and ``meta_info``: the inverse of :func:`put_together`."""
    tensors: dict[str, Any] = {}
    non_tensors: dict[str, np.ndarray] = {}
    meta_info: dict[str, Any] = {}
    for name in tensor_dict.keys():  # noqa: SIM118 (no mapping)
        key, value = str(name), tensor_dict.get(name)
        if isinstance(value, NonTensorStack):
            non_tensors[key] = object_array([item.data for item in value])
        elif isinstance(value, NonTensorData):
            meta_info[key] = value.data
        else:
            tensors[key] = value
    return tensors, non_tensors, meta_info


def put_together(
    tensors: Mapping[str, torch.Tensor],
    non_tensor_batch: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    num_rows: int,
) -> TensorDict:
    """One TensorDict of the three parts of a batch.

    Raises:
        BatchError: a key is in two of them.
    """
    keys = [*tensors, *non_tensor_batch, *meta_info]
    if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
        raise BatchError(f"The key {twice[0]!r} is in two parts of the DataProto, so one TensorDict cannot hold both.")
    result = TensorDict(dict(tensors), batch_size=[num_rows])
    for key, values in non_tensor_batch.items():
        result.set(key, NonTensorStack(*[NonTensorData(value) for value in values]))
    for key, value in meta_info.items():
        result.set(key, NonTensorData(value))  # type: ignore[arg-type]
    return result
