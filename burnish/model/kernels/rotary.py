"""What happens to queries and keys between their projection and attention: per-head RMS norm (Qwen3), rotary embedding.

The embedding is that of arXiv:2104.09864 in the half-split layout of Hugging Face.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.cpu.layers import compiled_for
from burnish.model.kernels.place import has_kernel


class HeadNorms(NamedTuple):
    """RMS norms over the dims of each head, before the rotation."""

    query: Tensor
    """[head_dim], weight."""
    key: Tensor
    """[head_dim], weight."""
    eps: float


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed if there are norms and rotated; values as they are.

    Rounds as Hugging Face does: the normed head, and every product before the sum.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous. Without norms the results take its place;
            with them it stays as it is, because the backward needs it.
        cos, sin: [tokens, head_dim], contiguous, of the dtype of ``qkv``, both halves alike.

    Returns:
        query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim]: views of joint tensors.
    """
    if has_kernel(qkv):
        from burnish.model.kernels.gpu import rotary

        turned = rotary.rotate(qkv, cos, sin, num_heads, num_kv_heads, norms)
    else:
        compiled, found = compiled_for(qkv), None
        if compiled is not None:
            found = compiled.rotate(qkv, cos, sin, num_heads, num_kv_heads, norms)
        turned = rotate_torch(qkv, cos, sin, num_heads, num_kv_heads, norms) if found is None else found
    num_turned = num_heads + num_kv_heads
    heads = qkv.unflatten(1, (num_turned + num_kv_heads, -1))
    return turned[:, :num_heads], turned[:, num_heads:num_turned], heads[:, num_turned:]


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Gradient of `rotate`.

    Args:
        grads: of query, key and value, [tokens, heads, head_dim] each; the last axis is contiguous.
        qkv: what was rotated, where there are norms.

    Returns:
        [tokens, (num_heads + 2 * num_kv_heads) * head_dim], of ``qkv``, in one piece; and of the norms' weights [head_dim]
        each, in at least float32, or None without norms.
    """
    grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)  # type: ignore[assignment]
    if has_kernel(grads[0]):
        from burnish.model.kernels.gpu import rotary

        return rotary.rotate_backward(grads, cos, sin, qkv, norms)
    compiled = compiled_for(cos)
    if compiled is not None and (result := compiled.rotate_backward(grads, cos, sin, qkv, norms)) is not None:
        return result
    return rotate_backward_torch(grads, cos, sin, qkv, norms)


def rotate_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, norms: HeadNorms | None
) -> Tensor:
    """`rotate` in plain torch: [tokens, num_heads + num_kv_heads, head_dim]."""
    source = target = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))[:, :-num_kv_heads]
    if norms is not None:
        weight = _per_head(norms, num_heads, num_kv_heads)
        source = (_wide(source) * _rstd(source, norms.eps)).to(qkv.dtype).mul_(weight)
        target = torch.empty_like(source)
    cos, sin = cos[:, None], sin[:, None]
    first, second = source.chunk(2, -1)
    turned = torch.cat((-second, first), -1).mul_(sin)
    torch.mul(source, cos, out=target)
    return target.add_(turned)


def rotate_backward_torch(
    grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, qkv: Tensor | None, norms: HeadNorms | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`rotate_backward` in plain torch."""
    joint = torch.cat(grads, 1)
    num_heads, num_kv_heads = grads[0].shape[1], grads[1].shape[1]
    turned = joint[:, :-num_kv_heads]
    first, second = (turned * sin[:, None]).chunk(2, -1)
    half = first.shape[-1]
    turned.mul_(cos[:, None])
    turned[..., :half] += second
    turned[..., half:] -= first
    if qkv is None or norms is None:
        return joint.flatten(1), None
    source = qkv.view(joint.shape)[:, :-num_kv_heads]
    rstd = _rstd(source, norms.eps)
    normed = _wide(source) * rstd
    weight = _per_head(norms, num_heads, num_kv_heads)
    grad_weight = (_wide(turned) * normed.to(qkv.dtype)).sum(0)
    grad_normed = _wide(turned) * weight
    shared = (grad_normed * normed).mean(-1, keepdim=True)
    turned.copy_(grad_normed.addcmul_(normed, shared, value=-1).mul_(rstd))
    return joint.flatten(1), (grad_weight[:num_heads].sum(0), grad_weight[num_heads:].sum(0))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rstd(heads: Tensor, eps: float) -> Tensor:
    """[tokens, heads, 1]."""
    return _wide(heads).square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _per_head(norms: HeadNorms, num_heads: int, num_kv_heads: int) -> Tensor:
    """[heads, head_dim], the weight of each."""
    return torch.cat((norms.query.expand(num_heads, -1), norms.key.expand(num_kv_heads, -1)))
