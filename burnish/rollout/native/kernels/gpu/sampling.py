"""Draws tokens on a GPU: the vocabulary is read in chunks, one program a chunk and row, then one program a row draws.

A chunk gives its largest logit and the sum of its exponentials relative to it. The row's program adds the chunks up in
float64, finds the chunk in which the cumulative probability passes the row's uniform number, and looks into that chunk
alone. The twin in plain torch is `burnish.rollout.native.sampler`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.rollout.native.kernels.gpu import truncation
from burnish.rollout.native.kernels.gpu.truncation import inverse_temperature, is_kept
from burnish.rollout.native.sampler import Draw, SamplingRows

_BLOCK = 4096


class Chunks(NamedTuple):
    """What the chunks of each row hold: [rows, chunks] each."""

    maxima: Tensor
    """fp32, the largest logit."""
    sums: Tensor
    """fp32, of exp((logit - largest) / temperature)."""
    places: Tensor
    """int32, the first token with the largest logit."""


def draw(
    logits: Tensor, rows: SamplingRows, *, truncates: bool, block: int = _BLOCK, capacity: int = truncation.CAPACITY
) -> Draw:
    """See `burnish.rollout.native.sampler.draw`.

    Args:
        block: tokens a chunk, a power of two.
        capacity: see `burnish.rollout.native.kernels.gpu.truncation.find_kept`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    num_chunks, device = triton.cdiv(vocab, block), logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=device)
    truncated = torch.empty_like(log_probs) if truncates else None
    if not num_rows:
        return Draw(tokens, log_probs, truncated)
    whole = _empty_chunks(num_rows, num_chunks, device)
    values, kept, chunks = logits, None, whole
    if truncates:
        chunks = _empty_chunks(num_rows, num_chunks, device)
        values = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _scan[(num_chunks, num_rows)](
        logits,
        values,
        rows.temperature,
        rows.repetition_penalty,
        rows.temperature if rows.seen is None else rows.seen,
        rows.stop_ids,
        rows.may_stop,
        *whole,
        *chunks,
        vocab,
        logits.stride(0),
        values.stride(0),
        0 if rows.seen is None else rows.seen.stride(0),
        rows.stop_ids.stride(0),
        NUM_STOPS=rows.stop_ids.shape[1],
        HAS_SEEN=rows.seen is not None,
        TRUNCATES=truncates,
        BLOCK=block,
        num_warps=8,
    )
    if truncates:
        kept = truncation.find_kept(values, rows, chunks.maxima, chunks.sums, block=block, capacity=capacity)
    _pick[(num_rows,)](
        logits,
        values,
        rows.keys,
        rows.positions,
        rows.temperature,
        *whole,
        *chunks,
        *(rows.temperature,) * 4 if kept is None else kept,
        tokens,
        log_probs,
        log_probs if truncated is None else truncated,
        vocab,
        num_chunks,
        logits.stride(0),
        values.stride(0),
        TRUNCATES=truncates,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=block,
        num_warps=8,
    )
    return Draw(tokens, log_probs, truncated)


def _empty_chunks(num_rows: int, num_chunks: int, device: torch.device) -> Chunks:
    dtypes = (torch.float32, torch.float32, torch.int32)
    return Chunks(*(torch.empty(num_rows, num_chunks, dtype=dtype, device=device) for dtype in dtypes))


@triton.jit
def uniform(key, position):
    """`burnish.rollout.native.sampler.uniforms` of one row."""
    state = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _chunk_of(x, token, vocab, inverse):
    """The largest of ``x``, the sum of the exponentials relative to it, and the first token that has it."""
    largest = tl.max(x, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp((x - base) * inverse), 0), tl.min(tl.where(x == largest, token, vocab), 0)


@triton.jit
def _scan(
    logits,
    values,
    temperature,
    penalties,
    seen,
    stop_ids,
    may_stop,
    whole_maxima,
    whole_sums,
    whole_places,
    maxima,
    sums,
    places,
    vocab,
    logit_stride,
    value_stride,
    seen_stride,
    stop_stride,
    NUM_STOPS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    TRUNCATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums up one chunk; with TRUNCATES also after penalty and forbidden stop tokens, which it writes to ``values``."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out = row * tl.num_programs(0) + chunk
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    x = tl.load(logits + row * logit_stride + token, live, float("-inf"))
    inverse = inverse_temperature(tl.load(temperature + row))
    largest, total, place = _chunk_of(x, token, vocab, inverse)
    tl.store(whole_maxima + out, largest)
    tl.store(whole_sums + out, total)
    tl.store(whole_places + out, place)
    if TRUNCATES:
        if HAS_SEEN:
            penalty = tl.load(penalties + row)
            is_seen = tl.load(seen + row * seen_stride + token, live, 0) != 0
            x = tl.where(is_seen, tl.where(x > 0, tl.math.div_rn(x, penalty), x * penalty), x)
        is_forbidding = tl.load(may_stop + row) == 0
        for stop in tl.static_range(NUM_STOPS):
            is_stop = token == tl.load(stop_ids + row * stop_stride + stop)
            x = tl.where(is_stop & is_forbidding, float("-inf"), x)
        x = tl.where(x == 0, 0.0, x)  # One zero: later passes order floats by their bits.
        tl.store(values + row * value_stride + token, x, live)
        largest, total, place = _chunk_of(x, token, vocab, inverse)
        tl.store(maxima + out, largest)
        tl.store(sums + out, total)
        tl.store(places + out, place)


@triton.jit
def _log_sum(maxima, sums, row, num_chunks, inverse, CHUNKS: tl.constexpr):
    """The row's largest value and the float64 sum of its exponentials relative to that."""
    chunk = tl.arange(0, CHUNKS)
    live = chunk < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunk, live, float("-inf"))
    largest = tl.max(maximum, 0)
    weight = tl.load(sums + row * num_chunks + chunk, live, 0.0).to(tl.float64)
    return largest, tl.sum(weight * tl.exp(((maximum - largest) * inverse).to(tl.float64)), 0)


@triton.jit
def _first_above(weight, threshold, SIZE: tl.constexpr):
    """Index of the first of the float64 ``weight`` at which their cumulative sum exceeds ``threshold``, at the latest
    of the last one that is positive: rounding may lift the threshold to the total."""
    index = tl.arange(0, SIZE)
    is_hit = (tl.cumsum(weight, 0) > threshold) & (weight > 0)
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    return tl.minimum(tl.min(tl.where(is_hit, index, SIZE), 0), last)


@triton.jit
def _pick(
    logits,
    values,
    keys,
    positions,
    temperature,
    whole_maxima,
    whole_sums,
    whole_places,
    maxima,
    sums,
    places,
    kept_sums,
    thresholds,
    last_tokens,
    min_p,
    tokens,
    log_probs,
    truncated_log_probs,
    vocab,
    num_chunks,
    logit_stride,
    value_stride,
    TRUNCATES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    inverse = inverse_temperature(heat)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunk, live, float("-inf"))
    largest = tl.max(maximum, 0)
    if TRUNCATES:  # Kept sums are relative to the row's largest value, the others to their chunk's.
        scale = tl.zeros((CHUNKS,), tl.float64) + 1.0
        weight = tl.load(kept_sums + row * num_chunks + chunk, live, 0.0).to(tl.float64)
    else:
        scale = tl.exp(((maximum - largest) * inverse).to(tl.float64))
        weight = tl.load(sums + row * num_chunks + chunk, live, 0.0).to(tl.float64) * scale
    total = tl.sum(weight, 0)
    threshold = total * uniform(tl.load(keys + row), tl.load(positions + row))
    chosen = _first_above(weight, threshold, CHUNKS)
    threshold -= tl.sum(tl.where(chunk < chosen, weight, 0.0), 0)

    token = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * value_stride + token, token < vocab, float("-inf"))
    if TRUNCATES:
        inside = tl.exp((x - largest) * inverse)
        keep = is_kept(x, inside, token, tl.load(thresholds + row), tl.load(last_tokens + row), tl.load(min_p + row))
        inside = tl.where(keep, inside, 0.0)
    else:
        base = tl.max(tl.where(chunk == chosen, maximum, float("-inf")), 0)
        inside = tl.exp((x - base) * inverse)
        threshold = threshold / tl.sum(tl.where(chunk == chosen, scale, 0.0), 0)
    drawn = chosen * BLOCK + _first_above(inside.to(tl.float64), threshold, BLOCK)

    place = tl.load(places + row * num_chunks + chunk, live, vocab)
    first = tl.min(tl.where(maximum == largest, place, vocab), 0)
    drawn = tl.minimum(tl.where(heat == 0, first, drawn), vocab - 1)  # A NaN row's may be anything.
    tl.store(tokens + row, drawn.to(tl.int64))

    whole_largest, whole_total = _log_sum(whole_maxima, whole_sums, row, num_chunks, inverse, CHUNKS)
    logit = tl.load(logits + row * logit_stride + drawn)
    log_prob = ((logit - whole_largest) * inverse).to(tl.float64) - tl.log(whole_total)
    if TRUNCATES:
        value = tl.load(values + row * value_stride + drawn)
        truncated = ((value - largest) * inverse).to(tl.float64) - tl.log(total)
        nothing = (total > 0) == 0  # Or NaN.
        truncated = tl.where(nothing, float("nan"), truncated)
        log_prob = tl.where(nothing, float("nan"), log_prob)
        tl.store(truncated_log_probs + row, truncated.to(tl.float32))
    tl.store(log_probs + row, log_prob.to(tl.float32))
