"""What happens to queries, keys and values between their projection and attention, in one pass.

Per-head RMS norm (Qwen3), rotary embedding (arXiv:2104.09864, in the half-split layout of Hugging Face), cache write.
"""

import torch
from torch import Tensor

from burnish.rollout.native.kernels.cpu import compiled_for
from burnish.rollout.native.kernels.store import store_torch
from burnish.rollout.native.paged_cache import PagedCache


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cache: PagedCache,
    layer: int,
    places: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and rotates the queries and keys of ``qkv`` in place, and writes keys and values to the cache.

    Rounds as Hugging Face does: cos and sin to the dtype of ``qkv``, and every product before the sum.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous, of the cache's dtype: queries, keys, values.
        cos, sin: [num_positions, head_dim], both halves alike.
        positions: integers [tokens], rows of ``cos`` and ``sin``; None: these already have one row for each token.
        places: int64 [tokens], block * block_size + offset in the cache.
        q_norm, k_norm: [head_dim], weights of the norms over a head's dims; both or neither.
        eps: of these norms.

    Returns:
        Views of ``qkv``: query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim].

    Raises:
        ValueError: one of ``q_norm`` and ``k_norm`` without the other.
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rotate_and_store was given one of q_norm and k_norm alone; give both or neither.")
    if qkv.is_cuda:
        from burnish.rollout.native.kernels.gpu import rotary

        rotary.rotate_and_store(
            qkv, cos, sin, positions, cache, layer, places, num_heads, num_kv_heads, q_norm, k_norm, eps
        )
    else:
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        arguments = (cache, layer, places, num_heads, num_kv_heads, q_norm, k_norm, eps)
        if cos.dtype != qkv.dtype:
            cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        compiled = compiled_for(qkv)
        if compiled is None or not compiled.rotate_and_store(qkv, cos, sin, *arguments):
            rotate_and_store_torch(qkv, cos, sin, None, *arguments)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return query, key, value


def rotate_and_store_torch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cache: PagedCache,
    layer: int,
    places: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """`rotate_and_store` in plain torch."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.to(qkv.dtype)[:, None], sin.to(qkv.dtype)[:, None]
    turning = source = heads[:, :-num_kv_heads]
    if q_norm is not None and k_norm is not None:
        weight = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(num_kv_heads, -1)))
        wide = source.float()
        source = (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(qkv.dtype).mul_(weight)
    first, second = source.chunk(2, -1)
    turned = torch.cat((-second, first), -1).mul_(sin)
    torch.mul(source, cos, out=turning)
    turning.add_(turned)
    store_torch(cache, layer, places, heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:])
