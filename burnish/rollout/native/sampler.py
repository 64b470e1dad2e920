"""From logits to tokens and log-probs, for all rows at once, each row with its own random stream."""

import hashlib

import torch
from torch import Tensor

from burnish.rollout.base import SamplingParams

_INT64_BITS = 64
# Rows are sampled in chunks so that the float64 copies of a large vocabulary stay below 128 MiB each.
_MAX_CHUNK_ELEMENTS = 1 << 24


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
    """Draws one token a row.

    Args:
        logits: [rows, vocab], any float dtype.
        keys, positions: int64 [rows], see ``uniforms``.

    Returns:
        Token ids int64 [rows] and their log-probs fp32 [rows] under the full softmax(logits / temperature)
        (temperature 1 for greedy). A row with NaN or +inf logits has a NaN log-prob.
    """
    chunk = max(1, _MAX_CHUNK_ELEMENTS // logits.shape[-1])
    if logits.shape[0] <= chunk:
        return _sample_rows(logits, sampling, keys, positions)
    parts = [
        _sample_rows(rows, sampling, key, position)
        for rows, key, position in zip(logits.split(chunk), keys.split(chunk), positions.split(chunk), strict=True)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample_rows(logits: Tensor, sampling: SamplingParams, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / sampling.policy_temperature
    if sampling.greedy:
        tokens = scaled.argmax(-1)
    else:
        tokens = _inverse_cdf(scaled, truncation_mask(scaled, sampling.top_k, sampling.top_p), keys, positions)
    log_probs = scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)
    return tokens, log_probs


def _inverse_cdf(scaled: Tensor, keep: Tensor | None, keys: Tensor, positions: Tensor) -> Tensor:
    """The first token, in the order of the vocabulary, at which the cumulative probability exceeds a uniform number.

    In float64 and in a fixed order, so that rounding differences of the logits (other batch, other kernel) change a
    token only when the uniform number falls within them: about once in 10^6 tokens for fp32.
    """
    weights = (scaled - scaled.amax(-1, keepdim=True)).double().exp_()
    if keep is not None:
        weights.mul_(keep)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # u < 1, but u * total may round up to total, which no entry exceeds.
    threshold = torch.minimum(uniforms(keys, positions)[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=scaled.shape[-1] - 1)


def truncation_mask(scaled: Tensor, top_k: int, top_p: float) -> Tensor | None:
    """Which tokens top-k and top-p keep: [rows, vocab] bool, or None for all.

    Top-k first, then top-p on what it left, renormalised. Exactly k tokens, and the fewest tokens whose probability
    reaches p; of equal tokens the one with the lower id goes first.

    Args:
        scaled: [rows, vocab] logits / temperature.
    """
    vocab = scaled.shape[-1]
    count = min(top_k, vocab) if top_k > 0 else vocab
    if count == vocab and top_p >= 1:
        return None
    largest = scaled.topk(count).values if count < vocab else scaled.sort(descending=True).values
    kept = torch.full_like(scaled[:, 0], count, dtype=torch.int64)
    if top_p < 1:
        probs = largest.double().softmax(-1)
        kept = ((probs.cumsum(-1) - probs) < top_p).sum(-1)
    smallest = largest.gather(-1, (kept[:, None] - 1).clamp_(min=0))
    above, equal = scaled > smallest, scaled == smallest
    room = kept[:, None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))
