"""Softmax statistics and gradients of a chunk of logits: one program a token, which reads its row once.

Every lane of a program keeps the largest of the logits it has seen, and its sums relative to that, so that lanes and warps
meet only at the end of the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.model.kernels.head import OutputGrads, Softmax, Statistics

# 64 bytes a thread are on their way at once, which keeps the memory busy with two to four programs a multiprocessor.
_BLOCK = 4096
_WARPS = 8

# Less than any logit, and finite, so that no infinity is subtracted from another.
_LOWEST = tl.constexpr(-1e30)


def head_statistics(
    raw: Tensor, labels: Tensor, softmax: Softmax, *, want_entropy: bool, want_sum_squared: bool, block: int = _BLOCK
) -> Statistics:
    """See `burnish.model.kernels.head.head_statistics`; ``raw`` is float32 and stays as it is."""
    num_tokens, vocab = raw.shape
    log_probs, top1, normalizer = (_column(raw) for _ in range(3))
    entropy = _column(raw) if want_entropy else None
    squared = _column(raw) if want_sum_squared else None
    inner, outer = softmax.factors
    if num_tokens:
        _statistics[(num_tokens,)](
            raw,
            raw.stride(0),
            _or(softmax.bias, raw),
            labels,
            log_probs,
            top1,
            normalizer,
            _or(entropy, raw),
            _or(squared, raw),
            inner,
            outer,
            vocab,
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            WANT_ENTROPY=want_entropy,
            WANT_SQUARED=want_sum_squared,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return Statistics(log_probs, top1, normalizer, entropy, squared)


def head_gradient_(
    raw: Tensor,
    labels: Tensor,
    softmax: Softmax,
    statistics: Statistics,
    grads: OutputGrads,
    dtype: torch.dtype,
    *,
    block: int = _BLOCK,
) -> Tensor:
    """See `burnish.model.kernels.head.head_gradient_`; the result is a view of ``raw``."""
    num_tokens, vocab = raw.shape
    grad = _in_place_of(raw, dtype)
    inner, outer = softmax.factors
    if num_tokens:
        _gradient[(num_tokens,)](
            raw,
            raw.stride(0),
            grad,
            grad.stride(0),
            _or(softmax.bias, raw),
            labels,
            statistics.log_normalizer,
            _or(statistics.entropy, raw),
            _or(statistics.sum_pi_squared, raw),
            *(_or(None if g is None else g.contiguous(), raw) for g in grads),
            inner,
            outer,
            vocab,
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            LABEL=grads.log_probs is not None,
            ENTROPY=grads.entropy is not None,
            SQUARED=grads.sum_pi_squared is not None,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return grad


def kl_statistics(
    raw: Tensor, softmax: Softmax, other_raw: Tensor, other_softmax: Softmax, *, block: int = _BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """See `burnish.model.kernels.head.kl_statistics`; both products are float32 and stay as they are."""
    num_tokens, vocab = raw.shape
    kl, normalizer, other_normalizer = (_column(raw) for _ in range(3))
    if num_tokens:
        _kl_statistics[(num_tokens,)](
            raw,
            raw.stride(0),
            other_raw,
            other_raw.stride(0),
            _or(softmax.bias, raw),
            _or(other_softmax.bias, raw),
            kl,
            normalizer,
            other_normalizer,
            *softmax.factors,
            *other_softmax.factors,
            vocab,
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            OTHER_HAS_BIAS=other_softmax.bias is not None,
            OTHER_HAS_CAP=other_softmax.transform.softcap is not None,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return kl, normalizer, other_normalizer


def kl_gradient_(
    raw: Tensor,
    softmax: Softmax,
    other_raw: Tensor,
    other_softmax: Softmax,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad_kl: Tensor,
    dtype: torch.dtype,
    *,
    block: int = _BLOCK,
) -> Tensor:
    """See `burnish.model.kernels.head.kl_gradient_`; the result is a view of ``raw``."""
    num_tokens, vocab = raw.shape
    grad = _in_place_of(raw, dtype)
    if num_tokens:
        _kl_gradient[(num_tokens,)](
            raw,
            raw.stride(0),
            other_raw,
            other_raw.stride(0),
            grad,
            grad.stride(0),
            _or(softmax.bias, raw),
            _or(other_softmax.bias, raw),
            *statistics,
            grad_kl.contiguous(),
            *softmax.factors,
            *other_softmax.factors,
            vocab,
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            OTHER_HAS_BIAS=other_softmax.bias is not None,
            OTHER_HAS_CAP=other_softmax.transform.softcap is not None,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return grad


def _column(raw: Tensor) -> Tensor:
    return torch.empty(raw.shape[0], dtype=torch.float32, device=raw.device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """An address for an argument that the kernel does not read."""
    return other if tensor is None else tensor


def _in_place_of(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, vocab] in ``dtype``, each row at the beginning of the memory of that row of ``raw``."""
    return raw.view(dtype)[:, : raw.shape[1]]


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _load_z(raw, bias, index, live, inner, outer, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """z of a block, the lowest number beyond the vocabulary; and dz / draw."""
    x = tl.load(raw + index, live, 0.0)
    if HAS_BIAS:
        x += tl.load(bias + index, live, 0.0).to(tl.float32)
    if HAS_CAP:
        tanh = _tanh(x * inner)
        z = outer * tanh
        slope = (1.0 - tanh * tanh) * (inner * outer)
    else:
        z = outer * x
        slope = outer
    return tl.where(live, z, _LOWEST), slope


@triton.jit
def _statistics(
    raw,
    raw_stride,
    bias,
    labels,
    log_probs,
    top1_log_probs,
    log_normalizer,
    entropy,
    sum_pi_squared,
    inner,
    outer,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = raw + token * raw_stride
    label = tl.load(labels + token).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    at_label = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + lane
        z, _ = _load_z(row, bias, index, index < vocab, inner, outer, HAS_BIAS, HAS_CAP)
        # Taken here and not by a second load, so that it is the same number as the largest where it is the largest.
        at_label += tl.where(index == label, z, 0.0)
        new_top = tl.maximum(top, z)
        shrink = tl.exp(top - new_top)
        weight = tl.exp(z - new_top)
        if WANT_ENTROPY:
            moment = shrink * (moment + (top - new_top) * total) + weight * (z - new_top)
        if WANT_SQUARED:
            squares = squares * (shrink * shrink) + weight * weight
        total = total * shrink + weight
        top = new_top
    highest = tl.max(top, 0)
    # A lane that has seen no token counts zero times its sums, which are finite.
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, 0)
    log_whole = tl.log(whole)
    tl.store(log_probs + token, tl.sum(at_label, 0) - highest - log_whole)
    tl.store(top1_log_probs + token, -log_whole)
    tl.store(log_normalizer + token, highest + log_whole)
    if WANT_ENTROPY:
        mean = tl.sum(shrink * (moment + (top - highest) * total), 0) / whole
        tl.store(entropy + token, log_whole - mean)
    if WANT_SQUARED:
        tl.store(sum_pi_squared + token, tl.sum(squares * (shrink * shrink), 0) / (whole * whole))


@triton.jit
def _gradient(
    raw,
    raw_stride,
    grad,
    grad_stride,
    bias,
    labels,
    log_normalizer,
    entropy,
    sum_pi_squared,
    grad_log_probs,
    grad_entropy,
    grad_squared,
    inner,
    outer,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LABEL: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, target = raw + token * raw_stride, grad + token * grad_stride
    normalizer = tl.load(log_normalizer + token)
    label = tl.load(labels + token).to(tl.int32)
    at_label = 0.0
    of_entropy, entropy_now = 0.0, 0.0
    of_squared, squared_now = 0.0, 0.0
    if LABEL:
        at_label = tl.load(grad_log_probs + token)
    if ENTROPY:
        of_entropy, entropy_now = tl.load(grad_entropy + token), tl.load(entropy + token)
    if SQUARED:
        of_squared, squared_now = 2.0 * tl.load(grad_squared + token), tl.load(sum_pi_squared + token)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < vocab
        z, slope = _load_z(row, bias, index, live, inner, outer, HAS_BIAS, HAS_CAP)
        # The narrower gradient of this block lies on logits of this and earlier blocks: all of them have been read.
        tl.debug_barrier()
        log_prob = z - normalizer
        prob = tl.exp(log_prob)
        factor = tl.zeros((BLOCK,), tl.float32) - at_label
        if ENTROPY:
            factor -= of_entropy * (log_prob + entropy_now)
        if SQUARED:
            factor += of_squared * (prob - squared_now)
        value = prob * factor
        if LABEL:
            value += tl.where(index == label, at_label, 0.0)
        tl.store(target + index, (value * slope).to(grad.dtype.element_ty), live)


@triton.jit
def _kl_statistics(
    raw,
    raw_stride,
    other_raw,
    other_stride,
    bias,
    other_bias,
    kl,
    log_normalizer,
    other_log_normalizer,
    inner,
    outer,
    other_inner,
    other_outer,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    OTHER_HAS_BIAS: tl.constexpr,
    OTHER_HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, other_row = raw + token * raw_stride, other_raw + token * other_stride
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    other_top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    other_total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + lane
        live = index < vocab
        z, _ = _load_z(row, bias, index, live, inner, outer, HAS_BIAS, HAS_CAP)
        other_z, _ = _load_z(
            other_row, other_bias, index, live, other_inner, other_outer, OTHER_HAS_BIAS, OTHER_HAS_CAP
        )
        new_top, new_other_top = tl.maximum(top, z), tl.maximum(other_top, other_z)
        shrink, weight = tl.exp(top - new_top), tl.exp(z - new_top)
        # Of the difference itself: near policies agree in most digits of their logits.
        moment = moment * shrink + weight * (z - other_z)
        total = total * shrink + weight
        other_total = other_total * tl.exp(other_top - new_other_top) + tl.exp(other_z - new_other_top)
        top, other_top = new_top, new_other_top
    highest, other_highest = tl.max(top, 0), tl.max(other_top, 0)
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, 0)
    log_whole = tl.log(whole)
    other_log_whole = tl.log(tl.sum(other_total * tl.exp(other_top - other_highest), 0))
    mean = tl.sum(moment * shrink, 0) / whole
    tl.store(kl + token, (mean - (highest - other_highest)) - (log_whole - other_log_whole))
    tl.store(log_normalizer + token, highest + log_whole)
    tl.store(other_log_normalizer + token, other_highest + other_log_whole)


@triton.jit
def _kl_gradient(
    raw,
    raw_stride,
    other_raw,
    other_stride,
    grad,
    grad_stride,
    bias,
    other_bias,
    kl,
    log_normalizer,
    other_log_normalizer,
    grad_kl,
    inner,
    outer,
    other_inner,
    other_outer,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    OTHER_HAS_BIAS: tl.constexpr,
    OTHER_HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, other_row, target = raw + token * raw_stride, other_raw + token * other_stride, grad + token * grad_stride
    normalizer = tl.load(log_normalizer + token)
    shift = normalizer - tl.load(other_log_normalizer + token) + tl.load(kl + token)
    of_kl = tl.load(grad_kl + token)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < vocab
        z, slope = _load_z(row, bias, index, live, inner, outer, HAS_BIAS, HAS_CAP)
        other_z, _ = _load_z(
            other_row, other_bias, index, live, other_inner, other_outer, OTHER_HAS_BIAS, OTHER_HAS_CAP
        )
        # As in _gradient.
        tl.debug_barrier()
        value = tl.exp(z - normalizer) * (z - other_z - shift) * (of_kl * slope)
        tl.store(target + index, value.to(grad.dtype.element_ty), live)
