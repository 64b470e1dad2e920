"""Which form of an operation a tensor takes."""

import torch
from torch import Tensor


def has_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels serve ``x``: on a GPU, and not float64, which they would compute in float32."""
    return x.is_cuda and x.dtype != torch.float64
