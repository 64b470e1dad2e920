"""RMS norm and the residual connection before it: one program a token, and for the backward one for many tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.model.kernels import norm as plain
from burnish.model.kernels.gpu.launch import Shared, num_programs, warps_for


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
    *,
    num_warps: int | None = None,
) -> plain.Normed:
    """See `burnish.model.kernels.norm.rms_norm`.

    Args:
        num_warps: None is `warps_for`'s.
    """
    num_tokens, hidden = x.shape
    out = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    h = None if residual is None else torch.empty_like(out)
    rstd = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(hidden)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x,
            out if residual is None else residual,
            weight,
            out,
            out if h is None else h,
            rstd,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            offset,
            HIDDEN=hidden,
            HAS_RESIDUAL=residual is not None,
            HAS_OFFSET=offset != 0,
            BLOCK=block,
            num_warps=num_warps or warps_for(block),
        )
    return plain.Normed(out, x if h is None else h, rstd)


def shared_for(block: int) -> Shared:
    """For rows of ``block`` elements."""
    return Shared(8, warps_for(block), 1)


def rms_norm_backward(
    grad: Tensor,
    summed: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_summed: Tensor | None = None,
    *,
    again: bool = False,
    shared: Shared | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `burnish.model.kernels.norm.rms_norm_backward`.

    Args:
        shared: None is `shared_for`'s.
    """
    num_tokens, hidden = grad.shape
    block = triton.next_power_of_2(hidden)
    shared = shared or shared_for(block)
    grad_h = torch.empty(num_tokens, hidden, dtype=grad.dtype, device=grad.device)
    out = torch.empty_like(grad_h) if again else None
    programs = num_programs(num_tokens, grad.device, shared)
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=grad.device)
    if num_tokens:
        _rms_norm_backward[(programs,)](
            grad,
            summed,
            rstd,
            weight,
            grad if grad_summed is None else grad_summed,
            grad_h,
            grad_h if out is None else out,
            partial,
            num_tokens,
            grad.stride(0),
            summed.stride(0),
            0 if grad_summed is None else grad_summed.stride(0),
            HIDDEN=hidden,
            HAS_GRAD_SUMMED=grad_summed is not None,
            AGAIN=again,
            BLOCK=block,
            STAGES=shared.num_stages,
            num_warps=shared.num_warps,
        )
    return grad_h, partial.sum(0), out


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    new_residual,
    all_rstd,
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
    rstd = tl.rsqrt(tl.sum(h * h, 0) / HIDDEN + eps)
    tl.store(all_rstd + token, rstd)
    normed = h * rstd
    if HAS_OFFSET:
        scaled = normed * (offset + w)
    else:
        scaled = normed.to(dtype).to(tl.float32) * w
    tl.store(out + token * HIDDEN + dim, scaled.to(dtype), live)


@triton.jit
def _rms_norm_backward(
    grad,
    summed,
    all_rstd,
    weight,
    grad_summed,
    grad_h,
    out,
    partial,
    num_tokens,
    grad_stride,
    summed_stride,
    grad_summed_stride,
    HIDDEN: tl.constexpr,
    HAS_GRAD_SUMMED: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    live = dim < HIDDEN
    dtype = grad_h.dtype.element_ty
    w = tl.load(weight + dim, live, 0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for token in tl.range(program, num_tokens, tl.num_programs(0), num_stages=STAGES):
        h = tl.load(summed + token * summed_stride + dim, live, 0.0).to(tl.float32)
        g = tl.load(grad + token * grad_stride + dim, live, 0.0).to(tl.float32)
        rstd = tl.load(all_rstd + token)
        normed = h * rstd
        rounded = normed.to(dtype).to(tl.float32)
        grad_weight += g * rounded
        grad_normed = g * w
        shared = tl.sum(grad_normed * normed, 0) / HIDDEN
        d = rstd * (grad_normed - normed * shared)
        if HAS_GRAD_SUMMED:
            d += tl.load(grad_summed + token * grad_summed_stride + dim, live, 0.0).to(tl.float32)
        tl.store(grad_h + token * HIDDEN + dim, d.to(dtype), live)
        if AGAIN:
            tl.store(out + token * HIDDEN + dim, (rounded * w).to(dtype), live)
    tl.store(partial + program * HIDDEN + dim, grad_weight, live)
