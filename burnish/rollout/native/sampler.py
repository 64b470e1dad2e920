"""From logits to tokens and log-probs, each row by its own parameters and with its own random stream.

A token is drawn by inverting the cumulative distribution in the order of the vocabulary at one uniform number a row. On
a GPU `burnish.rollout.native.kernels.gpu.sampling` does the same; the two agree except where the uniform number or the mass
of a nucleus lies within rounding of a boundary (about once in 10^6 tokens).
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.rollout.base import SamplingParams
from burnish.rollout.native.kernels.cpu import compiled_for
from burnish.rollout.native.truncation import first_largest, keep_largest, penalize, truncation_mask

__all__ = ["Draw", "SamplingRows", "draw", "sample", "stream_key", "truncation_mask", "uniforms"]

_INT64_BITS = 64
# Rows are drawn in chunks whose temporaries (16 MiB each) stay near the caches and below malloc's limit for fresh pages.
_MAX_CHUNK_ELEMENTS = 1 << 22
# Neighbouring tokens whose float32 weights are summed before float64 takes over.
_SEGMENT = 256


class SamplingRows(NamedTuple):
    """How each row is drawn: tensors of one entry a row, on the device of the logits."""

    keys: Tensor
    """int64, from `stream_key`."""
    positions: Tensor
    """int64, the place of the token to be drawn in its sequence, prompt included."""
    temperature: Tensor
    """fp32; 0 is greedy: the largest logit, of equal ones the lowest id."""
    top_k: Tensor
    """int32; 0 or less is all tokens."""
    top_p: Tensor
    """fp32 in (0, 1]."""
    min_p: Tensor
    """fp32 in [0, 1]."""
    repetition_penalty: Tensor
    """fp32 above 0; it needs ``seen``."""
    stop_ids: Tensor
    """int32 [rows, any]; -1 pads."""
    may_stop: Tensor
    """bool; where False, no token of ``stop_ids`` can be drawn."""
    seen: Tensor | None
    """bool [rows, vocab]: the tokens that the prompt or the response holds; None where no row has a penalty."""


class Draw(NamedTuple):
    """One token a row."""

    tokens: Tensor
    """int64."""
    log_probs: Tensor
    """fp32, under the full softmax(logits / temperature), temperature 1 for greedy. NaN where a logit of the row is NaN
    or +inf, or nothing can be drawn."""
    truncated_log_probs: Tensor | None
    """fp32, under the distribution that was drawn from (for a greedy row: softmax of its logits after the penalty and
    without forbidden stop tokens); None where nothing truncates."""


def draw(logits: Tensor, rows: SamplingRows, *, truncates: bool) -> Draw:
    """Draws one token a row; no row depends on another one.

    In this order, as Hugging Face does: repetition penalty, forbidden stop tokens, temperature, top-k (exactly k tokens),
    top-p (the fewest most likely tokens that reach p of what top-k left), min-p. Of equally likely tokens the one with
    the lower id goes first. On a GPU nothing synchronises, so it can be captured in a graph.

    Args:
        logits: [rows, vocab]; computed with in fp32.
        truncates: False promises that every row draws from softmax(logits / temperature) or greedily: only ``keys``,
            ``positions`` and ``temperature`` are read then.
    """
    if logits.is_cuda:
        from burnish.rollout.native.kernels.gpu import sampling as gpu

        return gpu.draw(logits.float(), rows, truncates=truncates)
    num_rows, vocab = logits.shape
    chunk = max(1, _MAX_CHUNK_ELEMENTS // vocab)
    compiled, plain = compiled_for(logits), None
    if compiled is not None and (num_rows <= chunk or not truncates):
        plain = compiled.draw(logits, rows.keys, rows.positions, rows.temperature)
    if plain is not None and not truncates:
        return Draw(*plain, None)
    if num_rows <= chunk:
        drawn = _draw_truncated(logits.float(), rows) if truncates else _draw(logits.float(), rows)
        return drawn if plain is None else _with_plain_rows(drawn, rows, *plain)
    parts = [
        draw(logits[start : start + chunk], _slice_rows(rows, start, start + chunk), truncates=truncates)
        for start in range(0, num_rows, chunk)
    ]
    truncated = [part.truncated_log_probs for part in parts if part.truncated_log_probs is not None]
    return Draw(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.log_probs for part in parts]),
        torch.cat(truncated) if truncated else None,
    )


def _with_plain_rows(drawn: Draw, rows: SamplingRows, tokens: Tensor, log_probs: Tensor) -> Draw:
    """``drawn``, but where nothing truncates the row's token and log-prob are the given ones, to the bit those that it
    gets in a batch in which nothing truncates."""
    greedy = rows.temperature == 0
    whole = greedy | ((rows.top_k <= 0) & (rows.top_p >= 1) & (rows.min_p <= 0))
    whole &= (rows.repetition_penalty == 1) & rows.may_stop
    chosen = zip((tokens, log_probs, log_probs), drawn, strict=True)
    return Draw(*(None if there is None else torch.where(whole, here, there) for here, there in chosen))  # type: ignore[arg-type]


def _slice_rows(rows: SamplingRows, start: int, end: int) -> SamplingRows:
    return SamplingRows(*(None if values is None else values[start:end] for values in rows))  # type: ignore[arg-type]


def _draw(logits: Tensor, rows: SamplingRows) -> Draw:
    inverse = inverse_temperature(rows.temperature)
    probs = _scaled(logits, inverse).softmax(-1)
    tokens, _ = _invert_cdf(probs, uniforms(rows.keys, rows.positions))
    tokens = _greedy_or(tokens, logits, rows.temperature)
    return Draw(tokens, probs.gather(1, tokens[:, None])[:, 0].log(), None)


def _draw_truncated(logits: Tensor, rows: SamplingRows) -> Draw:
    values, changed = penalize(logits, rows.repetition_penalty, rows.seen, rows.stop_ids, rows.may_stop)
    inverse, greedy = inverse_temperature(rows.temperature), rows.temperature == 0
    scores = _scaled(values, inverse)
    probs = scores.softmax(-1)
    kept = keep_largest(
        probs,
        scores,
        values,
        rows.top_k.masked_fill(greedy, 0),
        rows.top_p.masked_fill(greedy, 1.0),
        rows.min_p.masked_fill(greedy, 0.0),
    )
    tokens, total = _invert_cdf(kept, uniforms(rows.keys, rows.positions))
    tokens = _greedy_or(tokens, values, rows.temperature)
    log_probs = probs.gather(1, tokens[:, None])[:, 0].log()
    truncated = (log_probs - total.log()).float()
    if len(changed):
        # Not the logarithm of a softmax: a token may be likely only because of what the other tokens lost.
        scores = _scaled(logits[changed], inverse[changed])
        log_probs[changed] = scores.log_softmax(-1).gather(1, tokens[changed, None])[:, 0]
    return Draw(tokens, log_probs.masked_fill_(truncated.isnan(), float("nan")), truncated)


def inverse_temperature(temperature: Tensor) -> Tensor:
    """fp32 [rows]: what logits are multiplied with; 1 for greedy rows, and bounded, since 1 / 1e-45 is infinite."""
    return torch.where(temperature == 0, 1.0, temperature.float().reciprocal().clamp(max=1e30))


def _scaled(values: Tensor, inverse: Tensor) -> Tensor:
    if (inverse == 1).all():
        return values
    # Below the largest one, so that no temperature makes them overflow, and rounding is relative to the difference.
    return (values - values.amax(-1, keepdim=True)).mul_(inverse[:, None])


def _greedy_or(tokens: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    greedy = temperature == 0
    return torch.where(greedy, first_largest(values), tokens) if greedy.any() else tokens


def _invert_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first token, in the order of the vocabulary, at which the cumulative weight exceeds ``uniform`` of the total.

    Segments of the vocabulary are summed in float32 and added up in float64; only the chosen segment is looked into.

    Args:
        weights: fp32 [rows, vocab], none negative.
        uniform: float64 [rows] in [0, 1).

    Returns:
        Tokens int64 [rows] and the totals float64 [rows].
    """
    vocab = weights.shape[1]
    whole = vocab // _SEGMENT
    sums = weights[:, : whole * _SEGMENT].unflatten(-1, (whole, _SEGMENT)).sum(-1)
    if whole * _SEGMENT < vocab:
        sums = torch.cat([sums, weights[:, whole * _SEGMENT :].sum(-1, keepdim=True)], dim=1)
    cumulative = sums.double().cumsum(-1)
    total = cumulative[:, -1:]
    threshold = uniform[:, None] * total
    segment = _first_above(cumulative, threshold)
    before = cumulative.gather(1, (segment - 1).clamp_(min=0)).masked_fill_(segment == 0, 0.0)
    places = segment * _SEGMENT + torch.arange(_SEGMENT, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocab - 1)).masked_fill_(places >= vocab, 0.0)
    tokens = segment * _SEGMENT + _first_above(inside.double().cumsum_(-1), threshold - before)
    return tokens[:, 0].clamp_(max=vocab - 1), total[:, 0]


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Index [rows, 1] of the first of ``cumulative`` [rows, n] above ``threshold`` [rows, 1], and at the latest of the
    first that equals the last: rounding may lift the threshold to the total, which no entry exceeds."""
    total = cumulative[:, -1:]
    threshold = torch.minimum(threshold, torch.nextafter(total, total.new_zeros(())))
    index = torch.searchsorted(cumulative, threshold, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)  # Where the row is NaN.


def stream_key(seed: int, uid: str, sample_index: int) -> int:
    """The key (int64) of one response's random stream: a hash of what names the response, stable across processes."""
    digest = hashlib.blake2b(f"{seed}\0{uid}\0{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of key and position: no state, so no batch can disturb another row.

    The counter-based form of SplitMix64 (Steele, Lea, Flood 2014): the finalizer over ``key + position * gamma``.

    Args:
        keys: int64 [rows], from ``stream_key``.
        positions: int64 [rows], the place of the token in its sequence.

    Returns:
        float64 [rows] with 53 random bits.
    """
    # int64 arithmetic wraps around, which is what the algorithm's uint64 does; constants are their signed twins.
    state = keys + (positions + 1) * -0x61C8864680B583EB
    state = (state ^ _shift_right(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shift_right(state, 27)) * -0x6B2FB644ECCEEE15
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).double() * 2.0**-53


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (value >> bits) & ((1 << (_INT64_BITS - bits)) - 1)


def sample(logits: Tensor, sampling: SamplingParams, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` where all rows share temperature, top-k, top-p and min-p; nothing else of ``sampling`` is looked at.

    Args:
        logits: [rows, vocab], any float dtype.
        keys, positions: int64 [rows], see ``uniforms``.

    Returns:
        Token ids int64 [rows] and their log-probs fp32 [rows], see `Draw`.
    """
    count, device = len(logits), logits.device
    truncates = not sampling.greedy and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
    rows = SamplingRows(
        keys=keys,
        positions=positions,
        temperature=torch.full((count,), 0.0 if sampling.greedy else sampling.temperature, device=device),
        top_k=torch.full((count,), sampling.top_k, dtype=torch.int32, device=device),
        top_p=torch.full((count,), sampling.top_p, device=device),
        min_p=torch.full((count,), sampling.min_p, device=device),
        repetition_penalty=torch.ones(count, device=device),
        stop_ids=torch.full((count, 1), -1, dtype=torch.int32, device=device),
        may_stop=torch.ones(count, dtype=torch.bool, device=device),
        seen=None,
    )
    drawn = draw(logits, rows, truncates=truncates)
    return drawn.tokens, drawn.log_probs
