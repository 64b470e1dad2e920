"""RMS norm (arXiv:1910.07467), with the residual connection before it, rounded as Hugging Face rounds."""

from typing import overload

from torch import Tensor

from burnish.model import kernels
from burnish.rollout.native.kernels.cpu import compiled_for


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None, offset: float = 0.0) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """``weight * (h / sqrt(mean(h^2) + eps))`` of h = ``x``, or of h = ``x + residual`` rounded to the dtype of ``x``.

    The mean is taken in float32 and the normed h rounded before it is multiplied, as in LlamaRMSNorm. With an ``offset``
    the factor is ``offset + weight`` and everything stays float32 until the end, as in GemmaRMSNorm.

    Args:
        x: [tokens, hidden].
        weight: [hidden], of the dtype of ``x``.
        residual: [tokens, hidden].

    Returns:
        [tokens, hidden]; with a residual also h.
    """
    compiled = compiled_for(x)
    if compiled is not None and (result := compiled.rms_norm(x, weight, eps, residual, offset)) is not None:
        return result
    normed = kernels.rms_norm(x, weight, eps, residual, offset)
    return normed.out if residual is None else (normed.out, normed.summed)
