"""The gated activation of an MLP (SwiGLU, arXiv:2002.05202) on the joint output of its two projections."""

from torch import Tensor

from burnish.model import kernels
from burnish.rollout.native.kernels.cpu import compiled_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, silu rounded to the dtype before the product, as Hugging Face's MLPs do.

    Args:
        gate_up: [tokens, 2 * intermediate], gate then up.

    Returns:
        [tokens, intermediate].
    """
    compiled = compiled_for(gate_up)
    if compiled is not None and (result := compiled.silu_mul(gate_up)) is not None:
        return result
    return kernels.silu_mul(gate_up)
