"""Equality of whatever a batch may hold; NaN equals NaN, since a value equals its copy."""

from typing import Any

import numpy as np
import torch


def same_value(left: Any, right: Any) -> bool:
    """Whether two values are equal, through containers, arrays and tensors."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_tensor(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    return bool(left == right)


def same_tensor(left: torch.Tensor, right: torch.Tensor, where: torch.Tensor | None = None) -> bool:
    """Whether shapes and values are equal, the latter only where ``where`` is true."""
    if left.shape != right.shape:
        return False
    right = right.to(left.device)
    equal = (left == right) | ((left != left) & (right != right))
    return bool(equal.all() if where is None else (equal | ~where).all())


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether shapes and values are equal."""
    if left.shape != right.shape:
        return False
    return all(map(same_value, left.reshape(-1).tolist(), right.reshape(-1).tolist()))
