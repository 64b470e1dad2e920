"""Head norms, rotary embedding and cache write: one program for some heads of one token."""

import triton
import triton.language as tl
from torch import Tensor

from burnish.rollout.native.kernels.gpu.store import cache_pointers
from burnish.rollout.native.paged_cache import PagedCache

_ELEMENTS = 1024


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
) -> None:
    """See `burnish.rollout.native.kernels.rotary.rotate_and_store`."""
    num_tokens = qkv.shape[0]
    if not num_tokens:
        return
    all_heads = num_heads + 2 * num_kv_heads
    head_dim = qkv.shape[1] // all_heads
    half_block = triton.next_power_of_2(head_dim // 2)
    head_block = min(triton.next_power_of_2(all_heads), max(_ELEMENTS // (2 * half_block), 1))
    _rotate_and_store[(num_tokens, triton.cdiv(all_heads, head_block))](
        qkv,
        cos,
        sin,
        places if positions is None else positions,
        cache.addresses[layer],
        places,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HAS_POSITIONS=positions is not None,
        HAS_NORM=q_norm is not None,
        HEAD_BLOCK=head_block,
        HALF_BLOCK=half_block,
    )


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    positions,
    addresses,
    places,
    q_norm,
    k_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = dim < HALF
    live = (head < HEADS + 2 * KV_HEADS) & in_half
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS

    at = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + dim
    first_in = tl.load(at, live, 0.0)
    second_in = tl.load(at + HALF, live, 0.0)
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        q_first = tl.load(q_norm + dim, in_half, 0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + dim, in_half, 0.0).to(tl.float32)
        k_first = tl.load(k_norm + dim, in_half, 0.0).to(tl.float32)
        k_second = tl.load(k_norm + HALF + dim, in_half, 0.0).to(tl.float32)
        first = (first * factor).to(dtype).to(tl.float32) * tl.where(is_query, q_first, k_first)
        second = (second * factor).to(dtype).to(tl.float32) * tl.where(is_query, q_second, k_second)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)

    if HAS_POSITIONS:
        row = tl.load(positions + token).to(tl.int64) * DIM
    else:
        row = token * DIM
    cos_first = tl.load(cos + row + dim, in_half, 0.0).to(dtype).to(tl.float32)
    cos_second = tl.load(cos + row + HALF + dim, in_half, 0.0).to(dtype).to(tl.float32)
    sin_first = tl.load(sin + row + dim, in_half, 0.0).to(dtype).to(tl.float32)
    sin_second = tl.load(sin + row + HALF + dim, in_half, 0.0).to(dtype).to(tl.float32)
    first_out = (first * cos_first).to(dtype).to(tl.float32) - (second * sin_first).to(dtype).to(tl.float32)
    second_out = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
    first_out, second_out = first_out.to(dtype), second_out.to(dtype)

    rotated = live & (head < HEADS + KV_HEADS)
    tl.store(at, first_out, rotated)
    tl.store(at + HALF, second_out, rotated)
    keys, values = cache_pointers(addresses, dtype)
    place = tl.load(places + token) * (KV_HEADS * DIM)
    is_key = rotated & (head >= HEADS)
    into = keys + place + (head - HEADS) * DIM + dim
    tl.store(into, first_out, is_key)
    tl.store(into + HALF, second_out, is_key)
    into = values + place + (head - HEADS - KV_HEADS) * DIM + dim
    tl.store(into, first_in, live & is_value)
    tl.store(into + HALF, second_in, live & is_value)
