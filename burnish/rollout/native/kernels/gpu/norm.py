"""RMS norm and the residual connection before it: one program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """See `burnish.rollout.native.kernels.norm.rms_norm`; the last axis is contiguous."""
    num_tokens, hidden = x.shape
    out = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    h = None if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(hidden)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x,
            out if residual is None else residual,
            weight,
            out,
            out if h is None else h,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            offset,
            HIDDEN=hidden,
            HAS_RESIDUAL=residual is not None,
            HAS_OFFSET=offset != 0,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 16),
        )
    return out if h is None else (out, h)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    new_residual,
    x_stride,
    residual_stride,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    live = dim < HIDDEN
    dtype = out.dtype.element_ty
    h = tl.load(x + token * x_stride + dim, live, 0.0).to(tl.float32)
    w = tl.load(weight + dim, live, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + token * residual_stride + dim, live, 0.0).to(tl.float32)
        rounded = h.to(dtype)
        tl.store(new_residual + token * HIDDEN + dim, rounded, live)
        h = rounded.to(tl.float32)
    normed = h * tl.rsqrt(tl.sum(h * h, 0) / HIDDEN + eps)
    if HAS_OFFSET:
        scaled = normed * (offset + w)
    else:
        scaled = normed.to(dtype).to(tl.float32) * w
    tl.store(out + token * HIDDEN + dim, scaled.to(dtype), live)
