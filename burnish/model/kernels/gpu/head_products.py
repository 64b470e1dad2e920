"""The head's product with what follows it in one kernel: the logits of a tile stay in registers.

A tile of logits is [tokens, vocabulary]. The forward leaves four numbers of each token and tile, which a second kernel joins;
the backward leaves the gradient in half precision. Written to memory and read again, the float32 logits cost about as much as
the product itself where the hidden size is small (cut cross-entropy, arXiv:2411.09009, does the same for a loss).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from burnish.model.kernels.head import OutputGrads, Softmax, Statistics

_TOKENS, _VOCAB, _DEPTH = 128, 256, 64
_WARPS, _STAGES = 8, 4
# Rows of tiles that are computed beside each other, so that their operands are found in the cache.
_GROUP = 32
# Tiles are fetched by the tensor memory accelerator, which wants addresses and rows to be multiples of this.
_ALIGNED_BYTES = 16

# Less than any logit, and finite, so that no infinity is subtracted from another.
_LOWEST = tl.constexpr(-1e30)


def serves(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute this product: half precision, whole steps of the hidden size, contiguous rows."""
    return (
        hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.shape[1] % _DEPTH == 0
        and all(x.is_contiguous() and x.data_ptr() % _ALIGNED_BYTES == 0 for x in (hidden, weight))
    )


def product_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softmax: Softmax,
    *,
    want_entropy: bool,
    want_sum_squared: bool,
    num_stages: int = _STAGES,
) -> Statistics:
    """As `burnish.model.kernels.head.head_statistics` of ``hidden @ weight.T`` in float32, for any number of tokens.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
    """
    num_tokens, vocab = hidden.shape[0], weight.shape[0]
    num_tiles = triton.cdiv(vocab, _VOCAB)
    column: dict[str, Any] = {"dtype": torch.float32, "device": hidden.device}
    log_probs, top1, normalizer, at_label = (torch.empty(num_tokens, **column) for _ in range(4))
    entropy = torch.empty(num_tokens, **column) if want_entropy else None
    squared = torch.empty(num_tokens, **column) if want_sum_squared else None
    parts = torch.empty(num_tokens, num_tiles, 4, **column)
    inner, outer = softmax.factors
    if num_tokens:
        _tile_statistics[(triton.cdiv(num_tokens, _TOKENS) * num_tiles,)](
            _tiles(hidden, _TOKENS),
            _tiles(weight, _VOCAB),
            weight if softmax.bias is None else softmax.bias,
            labels,
            parts,
            at_label,
            inner,
            outer,
            num_tokens,
            vocab,
            HIDDEN=hidden.shape[1],
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            WANT_ENTROPY=want_entropy,
            WANT_SQUARED=want_sum_squared,
            TOKENS=_TOKENS,
            VOCAB=_VOCAB,
            DEPTH=_DEPTH,
            GROUP=_GROUP,
            num_warps=_WARPS,
            num_stages=num_stages,
        )
        _join[(num_tokens,)](
            parts,
            at_label,
            log_probs,
            top1,
            normalizer,
            log_probs if entropy is None else entropy,
            log_probs if squared is None else squared,
            num_tiles,
            WANT_ENTROPY=want_entropy,
            WANT_SQUARED=want_sum_squared,
            BLOCK=triton.next_power_of_2(num_tiles),
            num_warps=4,
        )
    return Statistics(log_probs, top1, normalizer, entropy, squared)


def product_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softmax: Softmax,
    statistics: Statistics,
    grads: OutputGrads,
    out: Tensor,
    *,
    num_stages: int = _STAGES,
) -> Tensor:
    """As `burnish.model.kernels.head.head_gradient_` of ``hidden @ weight.T``, into ``out`` [tokens, vocab]."""
    num_tokens, vocab = hidden.shape[0], weight.shape[0]
    inner, outer = softmax.factors
    unused = statistics.log_normalizer
    if num_tokens:
        _tile_gradient[(triton.cdiv(num_tokens, _TOKENS) * triton.cdiv(vocab, _VOCAB),)](
            _tiles(hidden, _TOKENS),
            _tiles(weight, _VOCAB),
            weight if softmax.bias is None else softmax.bias,
            labels,
            statistics.log_normalizer,
            unused if statistics.entropy is None else statistics.entropy,
            unused if statistics.sum_pi_squared is None else statistics.sum_pi_squared,
            *(unused if grad is None else grad.contiguous() for grad in grads),
            out,
            out.stride(0),
            inner,
            outer,
            num_tokens,
            vocab,
            HIDDEN=hidden.shape[1],
            HAS_BIAS=softmax.bias is not None,
            HAS_CAP=softmax.transform.softcap is not None,
            LABEL=grads.log_probs is not None,
            ENTROPY=grads.entropy is not None,
            SQUARED=grads.sum_pi_squared is not None,
            TOKENS=_TOKENS,
            VOCAB=_VOCAB,
            DEPTH=_DEPTH,
            GROUP=_GROUP,
            num_warps=_WARPS,
            num_stages=num_stages,
        )
    return out


def _tiles(matrix: Tensor, rows: int) -> TensorDescriptor:
    """``matrix`` in tiles of ``rows`` rows; what lies beyond its end is read as zero."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, _DEPTH])


@triton.jit
def _place(num_tokens, vocab, TOKENS: tl.constexpr, VOCAB: tl.constexpr, GROUP: tl.constexpr):
    """The tile of this program: neighbours in time share tokens or a stretch of the vocabulary."""
    program = tl.program_id(0)
    rows, columns = tl.cdiv(num_tokens, TOKENS), tl.cdiv(vocab, VOCAB)
    first = program // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = program % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def _product(
    hidden, weight, row, column, HIDDEN: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr
):
    """A tile of ``hidden @ weight.T`` in float32."""
    sums = tl.zeros((TOKENS, VOCAB), tl.float32)
    for depth in range(0, HIDDEN, DEPTH):
        sums = tl.dot(hidden.load([row * TOKENS, depth]), weight.load([column * VOCAB, depth]).T, sums)
    return sums


@triton.jit
def _bent(x, bias, index, vocab, inner, outer, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """z of a tile of products, and dz / dx."""
    if HAS_BIAS:
        x += tl.load(bias + index, index < vocab, 0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        tanh = 2.0 * tl.sigmoid(2.0 * (x * inner)) - 1.0
        return outer * tanh, (1.0 - tanh * tanh) * (inner * outer)
    return outer * x, tl.zeros_like(x) + outer


@triton.jit
def _tile_statistics(
    hidden, weight, bias, labels, parts, at_label, inner, outer, num_tokens, vocab, HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_SQUARED: tl.constexpr,
    TOKENS: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(num_tokens, vocab, TOKENS, VOCAB, GROUP)
    token = row * TOKENS + tl.arange(0, TOKENS)
    index = column * VOCAB + tl.arange(0, VOCAB)
    live = token < num_tokens
    x = _product(hidden, weight, row, column, HIDDEN, TOKENS, VOCAB, DEPTH)
    z, _ = _bent(x, bias, index, vocab, inner, outer, HAS_BIAS, HAS_CAP)
    z = tl.where((index < vocab)[None, :], z, _LOWEST)
    label = tl.load(labels + token, live, 0).to(tl.int32)
    # Out of this tile and not by a product of its own, so that it is the same number as the largest where it is that.
    found = tl.sum(tl.where(index[None, :] == label[:, None], z, 0.0), 1)
    tl.store(at_label + token, found, live & (label // VOCAB == column))
    top = tl.max(z, 1)
    weights = tl.exp(z - top[:, None])
    part = parts + (token.to(tl.int64) * tl.cdiv(vocab, VOCAB) + column) * 4
    tl.store(part, top, live)
    tl.store(part + 1, tl.sum(weights, 1), live)
    if WANT_ENTROPY:
        tl.store(part + 2, tl.sum(tl.where((index < vocab)[None, :], weights * (z - top[:, None]), 0.0), 1), live)
    if WANT_SQUARED:
        tl.store(part + 3, tl.sum(weights * weights, 1), live)


@triton.jit
def _join(
    parts, at_label, log_probs, top1_log_probs, log_normalizer, entropy, sum_pi_squared, num_tiles,
    WANT_ENTROPY: tl.constexpr, WANT_SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of one token from those of its tiles, each of which is relative to its own largest logit."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    live = tile < num_tiles
    part = parts + (token * num_tiles + tile) * 4
    top = tl.load(part, live, _LOWEST)
    total = tl.load(part + 1, live, 0.0)
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, 0)
    log_whole = tl.log(whole)
    tl.store(log_probs + token, tl.load(at_label + token) - highest - log_whole)
    tl.store(top1_log_probs + token, -log_whole)
    tl.store(log_normalizer + token, highest + log_whole)
    if WANT_ENTROPY:
        moment = tl.load(part + 2, live, 0.0)
        # A tile without weight is not multiplied by its distance, which may be anything.
        distance = tl.where(shrink > 0, top - highest, 0.0)
        tl.store(entropy + token, log_whole - tl.sum(shrink * (moment + distance * total), 0) / whole)
    if WANT_SQUARED:
        squares = tl.load(part + 3, live, 0.0)
        tl.store(sum_pi_squared + token, tl.sum(squares * (shrink * shrink), 0) / (whole * whole))


@triton.jit
def _tile_gradient(
    hidden, weight, bias, labels, log_normalizer, entropy, sum_pi_squared, grad_log_probs, grad_entropy, grad_squared,
    out, out_stride, inner, outer, num_tokens, vocab, HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, LABEL: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, TOKENS: tl.constexpr,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(num_tokens, vocab, TOKENS, VOCAB, GROUP)
    token = row * TOKENS + tl.arange(0, TOKENS)
    index = column * VOCAB + tl.arange(0, VOCAB)
    live = token < num_tokens
    x = _product(hidden, weight, row, column, HIDDEN, TOKENS, VOCAB, DEPTH)
    z, slope = _bent(x, bias, index, vocab, inner, outer, HAS_BIAS, HAS_CAP)
    log_prob = z - tl.load(log_normalizer + token, live, 0.0)[:, None]
    prob = tl.exp(log_prob)
    factor = tl.zeros((TOKENS, VOCAB), tl.float32)
    if ENTROPY:
        of_entropy = tl.load(grad_entropy + token, live, 0.0)
        factor -= of_entropy[:, None] * (log_prob + tl.load(entropy + token, live, 0.0)[:, None])
    if SQUARED:
        of_squared = 2.0 * tl.load(grad_squared + token, live, 0.0)
        factor += of_squared[:, None] * (prob - tl.load(sum_pi_squared + token, live, 0.0)[:, None])
    if LABEL:
        of_label = tl.load(grad_log_probs + token, live, 0.0)[:, None]
        label = tl.load(labels + token, live, 0).to(tl.int32)
        factor -= of_label
        value = prob * factor + tl.where(index[None, :] == label[:, None], of_label, 0.0)
    else:
        value = prob * factor
    target = out + token.to(tl.int64)[:, None] * out_stride + index[None, :]
    tl.store(target, (value * slope).to(out.dtype.element_ty), live[:, None] & (index < vocab)[None, :])
