"""The product with a weight, by the faster of the two libraries that torch has for it on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CAN_PREPACK = _HAS_ONEDNN and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
# oneDNN pads what it prepacks to blocks of at most this many rows and columns.
_BLOCK = 64
# Elements of a weight below which oneDNN's own overhead, some ten microseconds a call, is more than it gains.
_LEAST_ELEMENTS = 1 << 18


@torch.no_grad()
def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, prepacked: Tensor | None = None) -> Tensor:
    """``x W^T + b``, not differentiable; the gradient of x is the same with ``weight.t()`` in place of the weight.

    In float32 on a CPU torch takes its BLAS, which for a few rows and a wide output is up to 1.5 times slower than oneDNN;
    in bf16 it takes oneDNN by itself.

    Args:
        x: [tokens, in].
        weight: [out, in].
        bias: [out].
        prepacked: ``prepack_weight(weight)``, where that is at hand: sooner the same result, to rounding.

    Returns:
        [tokens, out].
    """
    if prepacked is not None and x.shape[0] > 0:
        return prepacked_linear(x, prepacked, bias)
    if weight.numel() >= _LEAST_ELEMENTS and _HAS_ONEDNN and _is_float32_on_cpu(x) and x.shape[0] > 0:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return output
    return F.linear(x, weight, bias)


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def can_prepack(weight: Tensor) -> bool:
    """Whether `prepack_weight` takes ``weight``: a whole matrix on a CPU whose dtype oneDNN computes in there."""
    if not _CAN_PREPACK or weight.device.type != "cpu" or weight.dim() != 2 or type(weight.detach()) is not Tensor:
        return False
    if weight.dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


@torch.no_grad()
def prepack_weight(weight: Tensor) -> Tensor:
    """A copy of ``weight`` [out, in] in the order in which oneDNN reads it, which every call else makes for itself.

    An opaque tensor for `prepacked_linear`, good for any number of tokens. It does not follow ``weight`` when that changes.
    """
    # Without a batch size: told that there will be one token, oneDNN chooses an order that is slow for more.
    prepacked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return prepacked


def prepacked_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Memory of a prepacked weight, at most."""
    return _padded(out_features) * _padded(in_features) * dtype.itemsize


def prepacked_linear(x: Tensor, prepacked: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` [tokens, out] of x [tokens, in], at least one token, and ``prepacked = prepack_weight(W)``."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, "none", [], "")
    return output


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
