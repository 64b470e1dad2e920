"""Head norms and rotary embedding: one program for some heads of one token, or of many where it adds up over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.model.kernels import rotary as plain
from burnish.model.kernels.gpu.launch import Shared, num_programs, warps_for

_ELEMENTS = 1024
_PROGRAMS_PER_PROCESSOR = 16


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, norms: plain.HeadNorms | None
) -> Tensor:
    """See `burnish.model.kernels.rotary.rotate_torch`."""
    num_tokens, width = qkv.shape
    num_turned = num_heads + num_kv_heads
    head_dim = width // (num_turned + num_kv_heads)
    out = qkv.unflatten(1, (-1, head_dim))[:, :num_turned]
    if norms is not None:
        out = torch.empty(num_tokens, num_turned, head_dim, dtype=qkv.dtype, device=qkv.device)
    head_block, half_block, num_warps = _blocks(num_turned, head_dim)
    if num_tokens:
        _rotate[(num_tokens, triton.cdiv(num_turned, head_block))](
            qkv,
            out,
            cos,
            sin,
            qkv if norms is None else norms.query,
            qkv if norms is None else norms.key,
            0.0 if norms is None else norms.eps,
            width,
            out.stride(0),
            HEADS=num_heads,
            TURNED=num_turned,
            HALF=head_dim // 2,
            HAS_NORM=norms is not None,
            HEAD_BLOCK=head_block,
            HALF_BLOCK=half_block,
            num_warps=num_warps,
        )
    return out


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor | None,
    norms: plain.HeadNorms | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """See `burnish.model.kernels.rotary.rotate_backward`."""
    query, key, value = grads
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    all_heads = num_heads + 2 * num_kv_heads
    out = torch.empty(num_tokens, all_heads * head_dim, dtype=query.dtype, device=query.device)
    head_block, half_block, num_warps = _blocks(all_heads, head_dim)
    programs, head_programs = num_tokens, triton.cdiv(all_heads, head_block)
    partial = None
    if norms is not None:
        programs = num_programs(num_tokens, query.device, Shared(_PROGRAMS_PER_PROCESSOR, num_warps, 1))
        partial = torch.empty(programs, head_programs, 2, head_dim, dtype=torch.float32, device=query.device)
    if num_tokens:
        _rotate_backward[(programs, head_programs)](
            query,
            key,
            value,
            out,
            cos,
            sin,
            query if qkv is None else qkv,
            query if norms is None else norms.query,
            query if norms is None else norms.key,
            query if partial is None else partial,
            0.0 if norms is None else norms.eps,
            num_tokens,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HAS_NORM=norms is not None,
            HEAD_BLOCK=head_block,
            HALF_BLOCK=half_block,
            num_warps=num_warps,
        )
    if partial is None:
        return out, None
    grad_query, grad_key = partial.sum((0, 1))
    return out, (grad_query, grad_key)


def _blocks(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Heads and half dims of a program, and its warps, so that a thread has eight of each half."""
    half_block = triton.next_power_of_2(head_dim // 2)
    head_block = min(triton.next_power_of_2(num_heads), max(_ELEMENTS // (2 * half_block), 1))
    return head_block, half_block, warps_for(head_block * half_block)


@triton.jit
def _rotate(
    qkv,
    out,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    in_stride,
    out_stride,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
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
    live = (head < TURNED) & in_half

    at = qkv + token * in_stride + head * DIM + dim
    first = tl.load(at, live, 0.0).to(tl.float32)
    second = tl.load(at + HALF, live, 0.0).to(tl.float32)
    if HAS_NORM:
        is_query = head < HEADS
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rstd = tl.rsqrt(squares / DIM + eps)[:, None]
        q_first = tl.load(q_norm + dim, in_half, 0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + dim, in_half, 0.0).to(tl.float32)
        k_first = tl.load(k_norm + dim, in_half, 0.0).to(tl.float32)
        k_second = tl.load(k_norm + HALF + dim, in_half, 0.0).to(tl.float32)
        first = (first * rstd).to(dtype).to(tl.float32) * tl.where(is_query, q_first, k_first)
        second = (second * rstd).to(dtype).to(tl.float32) * tl.where(is_query, q_second, k_second)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)

    row = token * DIM + dim
    cos_first = tl.load(cos + row, in_half, 0.0).to(tl.float32)
    cos_second = tl.load(cos + row + HALF, in_half, 0.0).to(tl.float32)
    sin_first = tl.load(sin + row, in_half, 0.0).to(tl.float32)
    sin_second = tl.load(sin + row + HALF, in_half, 0.0).to(tl.float32)
    first_out = (first * cos_first).to(dtype).to(tl.float32) - (second * sin_first).to(dtype).to(tl.float32)
    second_out = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
    into = out + token * out_stride + head * DIM + dim
    tl.store(into, first_out.to(dtype), live)
    tl.store(into + HALF, second_out.to(dtype), live)


@triton.jit
def _rotate_backward(
    query,
    key,
    value,
    out,
    cos,
    sin,
    qkv,
    q_norm,
    k_norm,
    partial,
    eps,
    num_tokens,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype = out.dtype.element_ty
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = dim < HALF
    live = (head < ALL) & in_half
    is_query = live & (head < HEADS)
    is_key = live & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = live & (head >= HEADS + KV_HEADS)
    if HAS_NORM:
        w_first = tl.load(q_norm + dim + 0 * head, is_query, 0.0).to(tl.float32)
        w_first += tl.load(k_norm + dim + 0 * head, is_key, 0.0).to(tl.float32)
        w_second = tl.load(q_norm + HALF + dim + 0 * head, is_query, 0.0).to(tl.float32)
        w_second += tl.load(k_norm + HALF + dim + 0 * head, is_key, 0.0).to(tl.float32)
        grad_w_first = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)
        grad_w_second = tl.zeros([HEAD_BLOCK, HALF_BLOCK], tl.float32)

    for token in range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0)):
        q_at = query + token * query_stride + head * query_head_stride + dim
        k_at = key + token * key_stride + (head - HEADS) * key_head_stride + dim
        v_at = value + token * value_stride + (head - HEADS - KV_HEADS) * value_head_stride + dim
        v_first = tl.load(v_at, is_value, 0.0)
        v_second = tl.load(v_at + HALF, is_value, 0.0)
        g_first = tl.load(q_at, is_query, 0.0).to(tl.float32) + tl.load(k_at, is_key, 0.0).to(tl.float32)
        g_second = tl.load(q_at + HALF, is_query, 0.0).to(tl.float32) + tl.load(k_at + HALF, is_key, 0.0).to(tl.float32)
        row = token * DIM + dim
        cos_first = tl.load(cos + row, in_half, 0.0).to(tl.float32)
        cos_second = tl.load(cos + row + HALF, in_half, 0.0).to(tl.float32)
        sin_first = tl.load(sin + row, in_half, 0.0).to(tl.float32)
        sin_second = tl.load(sin + row + HALF, in_half, 0.0).to(tl.float32)
        first = g_first * cos_first + g_second * sin_second
        second = g_second * cos_second - g_first * sin_first
        if HAS_NORM:
            x_at = qkv + token * (ALL * DIM) + head * DIM + dim
            x_first = tl.load(x_at, is_query | is_key, 0.0).to(tl.float32)
            x_second = tl.load(x_at + HALF, is_query | is_key, 0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)
            rstd = tl.rsqrt(squares / DIM + eps)[:, None]
            n_first, n_second = x_first * rstd, x_second * rstd
            grad_w_first += first * n_first.to(dtype).to(tl.float32)
            grad_w_second += second * n_second.to(dtype).to(tl.float32)
            first, second = first * w_first, second * w_second
            shared = ((tl.sum(first * n_first, 1) + tl.sum(second * n_second, 1)) / DIM)[:, None]
            first, second = rstd * (first - n_first * shared), rstd * (second - n_second * shared)
        into = out + token * (ALL * DIM) + head * DIM + dim
        tl.store(into, tl.where(is_value, v_first, first.to(dtype)), live)
        tl.store(into + HALF, tl.where(is_value, v_second, second.to(dtype)), live)

    if HAS_NORM:
        place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        at = partial + place * (2 * DIM) + tl.arange(0, HALF_BLOCK)
        in_row = tl.arange(0, HALF_BLOCK) < HALF
        tl.store(at, tl.sum(tl.where(is_query, grad_w_first, 0.0), 0), in_row)
        tl.store(at + HALF, tl.sum(tl.where(is_query, grad_w_second, 0.0), 0), in_row)
        tl.store(at + DIM, tl.sum(tl.where(is_key, grad_w_first, 0.0), 0), in_row)
        tl.store(at + DIM + HALF, tl.sum(tl.where(is_key, grad_w_second, 0.0), 0), in_row)
