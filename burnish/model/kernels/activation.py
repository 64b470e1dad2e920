"""The gated activation of an MLP (SwiGLU, arXiv:2002.05202) on the joint output of its two projections."""

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.model.kernels.cpu.layers import compiled_for
from burnish.model.kernels.place import has_kernel


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, silu rounded to the dtype before the product, as Hugging Face's MLPs do.

    Args:
        gate_up: [tokens, 2 * intermediate], gate then up; the last axis is contiguous.

    Returns:
        [tokens, intermediate].
    """
    if has_kernel(gate_up):
        from burnish.model.kernels.gpu import activation

        return activation.silu_mul(gate_up)
    compiled = compiled_for(gate_up)
    if compiled is not None and (result := compiled.silu_mul(gate_up)) is not None:
        return result
    return silu_mul_torch(gate_up)


def silu_mul_backward(grad: Tensor, gate_up: Tensor, *, again: bool = True) -> Tensor:
    """Gradient of `silu_mul`; and its output once more, written over ``grad``, which takes no memory.

    Args:
        grad: [tokens, intermediate], contiguous; holds ``silu_mul(gate_up)`` afterwards.
        gate_up: as in the forward.
        again: False: the output is not needed, and what ``grad`` holds afterwards is nobody's.

    Returns:
        [tokens, 2 * intermediate], of gate and of up behind each other.
    """
    if has_kernel(grad):
        from burnish.model.kernels.gpu import activation

        return activation.silu_mul_backward(grad, gate_up, again=again)
    compiled = compiled_for(gate_up)
    if compiled is not None and (result := compiled.silu_mul_backward(grad, gate_up)) is not None:
        return result
    return silu_mul_backward_torch(grad, gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul_backward_torch(grad: Tensor, gate_up: Tensor) -> Tensor:
    """`silu_mul_backward` in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, -1)
    activated = F.silu(gate)
    torch.mul(grad, activated, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
    torch.mul(activated, up, out=grad)
    return out
