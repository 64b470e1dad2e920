"""SwiGLU's gate: one program for a stretch of one token's intermediate dims."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 2048


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `burnish.rollout.native.kernels.activation.silu_mul`; the last axis is contiguous."""
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty(num_tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(intermediate), _MAX_BLOCK)
    if num_tokens:
        _silu_mul[(num_tokens, triton.cdiv(intermediate, block))](
            gate_up,
            out,
            gate_up.stride(0),
            INTERMEDIATE=intermediate,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 8),
        )
    return out


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
