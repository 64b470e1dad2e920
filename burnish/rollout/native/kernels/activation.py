"""The gated activation of an MLP (SwiGLU, arXiv:2002.05202) on the joint output of its two projections."""

import torch.nn.functional as F
from torch import Tensor

from burnish.rollout.native.kernels.cpu import compiled_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, silu rounded to the dtype before the product, as Hugging Face's MLPs do.

    Args:
        gate_up: [tokens, 2 * intermediate], gate then up.

    Returns:
        [tokens, intermediate].
    """
    if gate_up.is_cuda:
        from burnish.rollout.native.kernels.gpu import activation

        return activation.silu_mul(gate_up)
    compiled = compiled_for(gate_up)
    if compiled is not None and (result := compiled.silu_mul(gate_up)) is not None:
        return result
    return silu_mul_torch(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
