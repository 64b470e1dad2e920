"""RMS norm (arXiv:1910.07467), with the residual connection before it, rounded as Hugging Face rounds."""

from typing import overload

from torch import Tensor

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
    if x.is_cuda:
        from burnish.rollout.native.kernels.gpu import norm

        return norm.rms_norm(x, weight, eps, residual, offset)
    compiled = compiled_for(x)
    if compiled is not None and (result := compiled.rms_norm(x, weight, eps, residual, offset)) is not None:
        return result
    return rms_norm_torch(x, weight, eps, residual, offset)


def rms_norm_torch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm` in plain torch."""
    h = x if residual is None else x + residual
    wide = h.float()
    normed = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if offset:
        out = normed.mul_(offset + weight.float()).to(x.dtype)
    else:
        out = normed.to(x.dtype).mul_(weight)
    return out if residual is None else (out, h)
