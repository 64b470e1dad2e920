"""RMS norm (arXiv:1910.07467), with the residual connection before it, rounded as Hugging Face rounds."""

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.cpu.layers import compiled_for
from burnish.model.kernels.place import has_kernel


class Normed(NamedTuple):
    """What `rms_norm` gives."""

    out: Tensor
    """[tokens, hidden]."""
    summed: Tensor
    """[tokens, hidden], what was normed: ``x``, or ``x + residual``."""
    rstd: Tensor
    """[tokens], 1 / sqrt(mean(summed^2) + eps), in at least float32: all that the backward needs besides ``summed``."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0) -> Normed:
    """``weight * (h * rstd)`` of h = ``x``, or of h = ``x + residual`` rounded to the dtype of ``x``.

    The mean is taken in float32 and the normed h rounded before it is multiplied, as in LlamaRMSNorm; float64 stays float64.
    With an ``offset`` the factor is ``offset + weight`` and nothing is rounded until the end, as in GemmaRMSNorm.

    Args:
        x: [tokens, hidden], the last axis contiguous.
        weight: [hidden], of the dtype of ``x``.
        residual: [tokens, hidden].
    """
    if has_kernel(x):
        from burnish.model.kernels.gpu import norm

        return norm.rms_norm(x, weight, eps, residual, offset)
    compiled = compiled_for(x)
    if compiled is not None and (result := compiled.rms_norm(x, weight, eps, residual, offset)) is not None:
        return Normed(*result)
    return rms_norm_torch(x, weight, eps, residual, offset)


def rms_norm_backward(
    grad: Tensor,
    summed: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_summed: Tensor | None = None,
    *,
    again: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `rms_norm` without an offset.

    With n = h * rstd and c = grad * weight:  dh = rstd (c - n mean(c n)),  dweight = sum over tokens of grad * n.

    Args:
        grad: [tokens, hidden], of ``out``.
        summed, rstd: from the forward.
        grad_summed: [tokens, hidden], the gradient that reaches h by other ways, such as the residual stream; it is added.
        again: whether the forward's ``out`` is wanted once more.

    Returns:
        Of h [tokens, hidden], which is that of ``x`` and of the residual, in the dtype of ``grad``; of ``weight`` [hidden],
        in the dtype of ``rstd``; and ``out`` or None.
    """
    if has_kernel(grad):
        from burnish.model.kernels.gpu import norm

        return norm.rms_norm_backward(grad, summed, rstd, weight, grad_summed, again=again)
    compiled = compiled_for(grad)
    if compiled is not None:
        result = compiled.rms_norm_backward(grad, summed, rstd, weight, grad_summed, again)
        if result is not None:
            return result
    return rms_norm_backward_torch(grad, summed, rstd, weight, grad_summed, again=again)


def rms_norm_torch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Normed:
    """`rms_norm` in plain torch."""
    h = x if residual is None else x + residual
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * rstd
    if offset:
        out = normed.mul_(offset + weight.to(wide.dtype)).to(x.dtype)
    else:
        out = normed.to(x.dtype).mul_(weight)
    return Normed(out, h, rstd[:, 0])


def rms_norm_backward_torch(
    grad: Tensor,
    summed: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_summed: Tensor | None = None,
    *,
    again: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`rms_norm_backward` in plain torch."""
    rstd = rstd[:, None]
    normed = summed.to(rstd.dtype) * rstd
    rounded = normed.to(summed.dtype)
    wide = grad.to(rstd.dtype)
    grad_normed = wide * weight
    grad_weight = (wide * rounded).sum(0)
    shared = (grad_normed * normed).mean(-1, keepdim=True)
    grad_h = grad_normed.addcmul_(normed, shared, value=-1).mul_(rstd)
    if grad_summed is not None:
        grad_h += grad_summed
    return grad_h.to(grad.dtype), grad_weight, rounded * weight if again else None
