"""SwiGLU's gate: one program for a stretch of one token's intermediate dims."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.model.kernels.gpu.launch import Tile, tile_for


def silu_mul(gate_up: Tensor, *, tile: Tile | None = None) -> Tensor:
    """See `burnish.model.kernels.activation.silu_mul`.

    Args:
        tile: None is `tile_for`'s.
    """
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty(num_tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    block, num_warps = tile or tile_for(intermediate)
    if num_tokens:
        _silu_mul[(num_tokens, triton.cdiv(intermediate, block))](
            gate_up,
            out,
            gate_up.stride(0),
            INTERMEDIATE=intermediate,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out


def silu_mul_backward(grad: Tensor, gate_up: Tensor, *, again: bool = True, tile: Tile | None = None) -> Tensor:
    """See `burnish.model.kernels.activation.silu_mul_backward`.

    Args:
        tile: None is `tile_for`'s.
    """
    num_tokens, intermediate = grad.shape
    grad_gate_up = torch.empty(num_tokens, 2 * intermediate, dtype=grad.dtype, device=grad.device)
    block, num_warps = tile or tile_for(intermediate)
    if num_tokens:
        _silu_mul_backward[(num_tokens, triton.cdiv(intermediate, block))](
            grad,
            gate_up,
            grad_gate_up,
            gate_up.stride(0),
            INTERMEDIATE=intermediate,
            AGAIN=again,
            BLOCK=block,
            num_warps=num_warps,
        )
    return grad_gate_up


@triton.jit
def _silu_mul(gate_up, out, stride, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = dim < INTERMEDIATE
    dtype = out.dtype.element_ty
    row = gate_up + token * stride
    gate = tl.load(row + dim, live, 0.0).to(tl.float32)
    up = tl.load(row + INTERMEDIATE + dim, live, 0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + dim, (activated * up).to(dtype), live)


@triton.jit
def _silu_mul_backward(
    grad, gate_up, grad_gate_up, stride, INTERMEDIATE: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = dim < INTERMEDIATE
    dtype = grad.dtype.element_ty
    row = gate_up + token * stride
    gate = tl.load(row + dim, live, 0.0).to(tl.float32)
    up = tl.load(row + INTERMEDIATE + dim, live, 0.0).to(tl.float32)
    at = grad + token * INTERMEDIATE + dim
    g = tl.load(at, live, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    activated = (gate * sigmoid).to(dtype).to(tl.float32)
    into = grad_gate_up + token * (2 * INTERMEDIATE) + dim
    tl.store(into, (g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), live)
    tl.store(into + INTERMEDIATE, (g * activated).to(dtype), live)
    if AGAIN:
        tl.store(at, (activated * up).to(dtype), live)
