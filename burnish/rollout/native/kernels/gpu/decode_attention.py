"""Paged decode attention: one program for the query heads of one key head, one row and one split of its tokens.

The scores of a tile are one small matrix product, queries padded to 16 rows, with an online softmax (arXiv:2205.14135);
splits are merged by their log-sum-exp in a second kernel (flash decoding).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.rollout.native.kernels.gpu.store import cache_pointers
from burnish.rollout.native.paged_cache import PagedCache


class Tiling(NamedTuple):
    """How the kernel is laid out."""

    block_n: int
    """Tokens a tile."""
    num_warps: int
    num_stages: int


def tiling_for(dtype: torch.dtype, head_dim: int, group: int = 1) -> Tiling:
    """The tiling for a head's width and the query heads of a key head; ``python -m benchmarks.kernels`` compares others.

    Where block numbers are loaded before keys, three and four stages both keep one tile in flight, five keep two.
    """
    if dtype == torch.float32:  # No tensor cores: scores are computed in full precision.
        tiling = Tiling(32, 4, 2)
    elif head_dim <= 64:
        tiling = Tiling(64, 2, 3)
    elif head_dim <= 128:
        tiling = Tiling(64, 4, 3)
    else:
        tiling = Tiling(32, 4, 2)
    # Accumulators of a large group would not fit into the registers of few warps.
    return tiling._replace(num_warps=max(tiling.num_warps, min(triton.next_power_of_2(group) // 8, 8)))


def decode_attention(
    query: Tensor,
    cache: PagedCache,
    layer: int,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int = 1,
    tiling: Tiling | None = None,
) -> Tensor:
    """See `burnish.rollout.native.kernels.decode_attention.decode_attention`.

    Args:
        tiling: None is `tiling_for`'s.
    """
    rows, num_heads, head_dim = query.shape
    shape = cache.layers[layer]
    num_kv_heads, value_dim = shape.num_kv_heads, shape.value_dim
    out = torch.empty(rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    partial, partial_lse = out, out
    if num_splits > 1:
        partial = torch.empty(rows, num_heads, num_splits, value_dim, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(rows, num_heads, num_splits, dtype=torch.float32, device=query.device)
    group = num_heads // num_kv_heads
    block_n, num_warps, num_stages = tiling or tiling_for(query.dtype, max(head_dim, value_dim), group)
    if rows:
        _attend[(rows * num_splits * num_kv_heads,)](
            query,
            cache.addresses[layer],
            block_tables,
            lengths,
            partial,
            partial_lse,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            scaling,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            KEY_DIM=head_dim,
            VALUE_DIM=value_dim,
            PAGE=cache.block_size,
            WINDOW=sliding_window or 0,
            SOFTCAP=softcap or 0.0,
            SPLITS=num_splits,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            BLOCK_G=max(triton.next_power_of_2(group), 16),
            BLOCK_K=max(triton.next_power_of_2(head_dim), 16),
            BLOCK_V=max(triton.next_power_of_2(value_dim), 16),
            BLOCK_N=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    if rows and num_splits > 1:
        _merge[(rows * num_heads,)](
            partial,
            partial_lse,
            out,
            SPLITS=num_splits,
            VALUE_DIM=value_dim,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_V=triton.next_power_of_2(value_dim),
            num_warps=1 if value_dim <= 128 else 4,
        )
    return out


@triton.jit
def _attend(
    query,
    addresses,
    block_tables,
    lengths,
    out,
    out_lse,
    query_stride,
    query_head_stride,
    table_stride,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    # The key heads of a row run side by side: their keys lie side by side in memory.
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    split = (program // KV_HEADS) % SPLITS
    row = (program // (KV_HEADS * SPLITS)).to(tl.int64)

    length = tl.load(lengths + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    first = begin // BLOCK_N * BLOCK_N
    last = length
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(length - first, BLOCK_N), SPLITS) * BLOCK_N
        first += split * part
        last = tl.minimum(first + part, length)

    member = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = tl.arange(0, BLOCK_V)
    q = tl.load(
        query + row * query_stride + head[:, None] * query_head_stride + key_dim[None, :],
        (member < GROUP)[:, None] & (key_dim < KEY_DIM)[None, :],
        0.0,
    )
    keys, values = cache_pointers(addresses, query.dtype.element_ty)
    keys += kv_head * KEY_DIM
    values += kv_head * VALUE_DIM
    table = block_tables + row * table_stride

    # Scores are kept in units of log 2, for exp2.
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        visible = token < last
        if WINDOW > 0:
            visible = visible & (token >= begin)
        if PAGE % BLOCK_N == 0:  # One block holds the whole tile.
            block = tl.load(table + start // PAGE).to(tl.int64)
            page = block * PAGE + start % PAGE
            place = page + tl.arange(0, BLOCK_N)
        else:
            block = tl.load(table + token // PAGE, visible, 0).to(tl.int64)
            place = block * PAGE + token % PAGE
        k = tl.load(
            keys + place[:, None] * (KV_HEADS * KEY_DIM) + key_dim[None, :],
            visible[:, None] & (key_dim < KEY_DIM)[None, :],
            0.0,
        )
        v = tl.load(
            values + place[:, None] * (KV_HEADS * VALUE_DIM) + value_dim[None, :],
            visible[:, None] & (value_dim < VALUE_DIM)[None, :],
            0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP > 0:
            small = tl.exp(-2.0 * tl.abs(scores) / SOFTCAP)
            capped = SOFTCAP * (1.0 - small) / (1.0 + small)
            scores = tl.where(scores < 0, -capped, capped)
        scores = tl.where(visible[None, :], scores * LOG2E, float("-inf"))
        # Every tile of the loop has a visible token, so this is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = higher

    live = (member < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
    place = row * (KV_HEADS * GROUP) + head
    if SPLITS > 1:
        # A short row leaves splits empty: they weigh exp2(-inf) = 0, and their sums are zeros.
        place = place * SPLITS + split
        tl.store(out_lse + place, highest + tl.log2(total), member < GROUP)
        total = tl.where(total > 0, total, 1.0)
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dim[None, :], (sums / total[:, None]).to(out.dtype.element_ty), live
    )


@triton.jit
def _merge(
    partial,
    partial_lse,
    out,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_V)
    lse = tl.load(partial_lse + head * SPLITS + split, split < SPLITS, float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    x = tl.load(
        partial + (head * SPLITS + split[:, None]) * VALUE_DIM + dim[None, :],
        (split < SPLITS)[:, None] & (dim < VALUE_DIM)[None, :],
        0.0,
    )
    merged = tl.sum(x * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * VALUE_DIM + dim, merged.to(out.dtype.element_ty), dim < VALUE_DIM)
