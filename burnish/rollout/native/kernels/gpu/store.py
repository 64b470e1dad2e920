"""Cache writes and reads: one program for a few tokens. The memory is found through ``cache.addresses``, see `PagedCache`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.rollout.native.paged_cache import LayerShape, PagedCache

_ELEMENTS = 1024


def store(cache: PagedCache, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
    """See `burnish.rollout.native.kernels.store.store`."""
    shape = cache.layers[layer]
    num_tokens = len(places)
    block, tokens = _tile(shape)
    if num_tokens:
        _store[(triton.cdiv(num_tokens, tokens),)](
            cache.addresses[layer],
            places,
            key,
            value,
            num_tokens,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            HEADS=shape.num_kv_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            TOKENS=tokens,
            BLOCK=block,
        )


def gather(cache: PagedCache, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """See `burnish.rollout.native.kernels.store.gather`."""
    shape = cache.layers[layer]
    num_tokens = len(places)
    key, value = (
        torch.empty(num_tokens, shape.num_kv_heads, dim, dtype=cache.dtype, device=places.device)
        for dim in (shape.key_dim, shape.value_dim)
    )
    block, tokens = _tile(shape)
    if num_tokens:
        _gather[(triton.cdiv(num_tokens, tokens),)](
            cache.addresses[layer],
            places,
            key,
            value,
            num_tokens,
            KEY_WIDTH=shape.num_kv_heads * shape.key_dim,
            VALUE_WIDTH=shape.num_kv_heads * shape.value_dim,
            TOKENS=tokens,
            BLOCK=block,
        )
    return key, value


def _tile(shape: LayerShape) -> tuple[int, int]:
    """How many elements of a token, and how many tokens, a program takes."""
    block = triton.next_power_of_2(shape.num_kv_heads * max(shape.key_dim, shape.value_dim))
    return block, max(_ELEMENTS // block, 1)


@triton.jit
def cache_pointers(addresses, dtype: tl.constexpr):
    """Where a layer's keys and values begin, from its row of ``cache.addresses``."""
    # Allocations begin at multiples of 256 bytes; the hint is what allows 16-byte accesses.
    key = tl.load(addresses).to(tl.pointer_type(dtype))
    value = tl.load(addresses + 1).to(tl.pointer_type(dtype))
    return tl.multiple_of(key, 16), tl.multiple_of(value, 16)


@triton.jit(do_not_specialize=["num_tokens"])
def _store(
    addresses,
    places,
    key,
    value,
    num_tokens,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    exists = token < num_tokens
    place = tl.load(places + token, exists, 0)
    keys, values = cache_pointers(addresses, key.dtype.element_ty)
    live = exists & (at < HEADS * KEY_DIM)
    x = tl.load(key + token * key_stride + (at // KEY_DIM) * key_head_stride + at % KEY_DIM, live)
    tl.store(keys + place * (HEADS * KEY_DIM) + at, x, live)
    live = exists & (at < HEADS * VALUE_DIM)
    x = tl.load(value + token * value_stride + (at // VALUE_DIM) * value_head_stride + at % VALUE_DIM, live)
    tl.store(values + place * (HEADS * VALUE_DIM) + at, x, live)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather(
    addresses,
    places,
    key,
    value,
    num_tokens,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    exists = token < num_tokens
    place = tl.load(places + token, exists, 0)
    keys, values = cache_pointers(addresses, key.dtype.element_ty)
    live = exists & (at < KEY_WIDTH)
    tl.store(key + token * KEY_WIDTH + at, tl.load(keys + place * KEY_WIDTH + at, live), live)
    live = exists & (at < VALUE_WIDTH)
    tl.store(value + token * VALUE_WIDTH + at, tl.load(values + place * VALUE_WIDTH + at, live), live)
