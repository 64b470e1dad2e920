"""Which tokens can be drawn: repetition penalty, forbidden stop tokens, top-k, top-p and min-p, by row, on a CPU.

Tokens are ordered by value, of equal ones the lower id first. Top-k and top-p each keep a first part of that order, so
what they keep is given by its last token.
"""

import torch
from torch import Tensor

# Parts of equal width, in score, in which the end of a nucleus is looked for before anything is sorted.
_NUM_BUCKETS = 1024
_SEGMENT = 256


def penalize(
    logits: Tensor, repetition_penalty: Tensor, seen: Tensor | None, stop_ids: Tensor, may_stop: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits after the repetition penalty (arXiv:1909.05858), -inf for stop tokens where they are forbidden.

    Args:
        logits: fp32 [rows, vocab].
        repetition_penalty: fp32 [rows].
        seen: bool [rows, vocab]; None: no penalty.
        stop_ids: int32 [rows, any]; -1 pads.
        may_stop: bool [rows].

    Returns:
        [rows, vocab], ``logits`` itself where nothing changes, and the indices of the rows that change.
    """
    vocab = logits.shape[1]
    values, penalized = logits, (repetition_penalty != 1) & (seen is not None)
    if seen is not None and penalized.any():
        places = seen.reshape(-1).nonzero()[:, 0]
        penalty = repetition_penalty.index_select(0, places // vocab)
        values = logits.clone(memory_format=torch.contiguous_format)
        before = values.view(-1)[places]
        values.view(-1)[places] = torch.where(before > 0, before / penalty, before * penalty)
    forbidden = (stop_ids >= 0) & (stop_ids < vocab) & ~may_stop[:, None]
    if forbidden.any():
        values = values.clone() if values is logits else values
        limits = torch.where(forbidden, float("-inf"), float("inf"))
        values.scatter_reduce_(1, stop_ids.long().where(forbidden, 0), limits, "amin")
    return values, (penalized | forbidden.any(-1)).nonzero()[:, 0]


def first_largest(values: Tensor) -> Tensor:
    """Index [rows] of the largest of ``values`` [rows, vocab], the lowest among equals; some index where there is NaN.

    ``argmax``, in two steps that both run at the speed of memory.
    """
    vocab = values.shape[1]
    whole = vocab // _SEGMENT
    largest = values[:, : whole * _SEGMENT].unflatten(-1, (whole, _SEGMENT)).amax(-1)
    if whole * _SEGMENT < vocab:
        largest = torch.cat([largest, values[:, whole * _SEGMENT :].amax(-1, keepdim=True)], dim=1)
    segment = largest.argmax(-1, keepdim=True)
    places = segment * _SEGMENT + torch.arange(_SEGMENT, device=values.device)
    inside = values.gather(1, places.clamp(max=vocab - 1))  # The last token again, after itself.
    return (segment * _SEGMENT + inside.argmax(-1, keepdim=True))[:, 0]


def keep_largest(probs: Tensor, scores: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The probabilities with zeros for what top-k, top-p and min-p drop.

    Args:
        probs: fp32 [rows, vocab], the softmax of ``scores``.
        scores: fp32 [rows, vocab], values / temperature.
        values: fp32 [rows, vocab], which decide the order.
        top_k: int32 [rows], 0 or less for all.
        top_p, min_p: fp32 [rows].

    Returns:
        [rows, vocab], ``probs`` itself where nothing is dropped.
    """
    vocab = values.shape[1]
    by_count = (top_k > 0) & (top_k < vocab)
    kept = probs
    for chosen, by_k in ((by_count, True), (~by_count & (top_p < 1), False)):
        if not chosen.any():
            continue
        every = bool(chosen.all())
        index = slice(None) if every else chosen.nonzero()[:, 0]
        some = probs[index], values[index], top_p[index]
        smallest, room = _top_k(*some, top_k[index]) if by_k else _top_p(*some, scores[index])
        part = _zero_below(*some[:2], smallest, room)
        if every:
            kept = part
        else:
            kept = kept.clone() if kept is probs else kept
            kept[index] = part
    if (min_p > 0).any():
        kept = _zero_unless(probs, (min_p * probs.amax(-1))[:, None], kept)
    return kept


def _zero_below(probs: Tensor, values: Tensor, smallest: Tensor, room: Tensor) -> Tensor:
    """Zeros below ``smallest`` [rows], and of the tokens that equal it all but the first ``room`` [rows] (-1: keep all)."""
    kept = _zero_unless(values, smallest[:, None], probs)
    tied = (room >= 0).nonzero()[:, 0]
    if len(tied):
        equal = values[tied] == smallest[tied, None]
        kept[tied] *= ~equal | (equal.cumsum(-1) <= room[tied, None])
    return kept


def _zero_unless(values: Tensor, least: Tensor, weights: Tensor) -> Tensor:
    """``weights`` where ``values`` are at least ``least``, else 0. A tenth of the time that a product with bool takes."""
    return torch.ge(values, least, out=torch.empty_like(weights)).mul_(weights)


def _top_k(probs: Tensor, values: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """What top-k and then top-p keep: the smallest value [rows], and of the tokens that equal it how many (-1: all)."""
    vocab = values.shape[1]
    largest, tokens = values.topk(min(int(top_k.max()) + 1, vocab))
    kept = top_k.long()
    if (top_p < 1).any():
        weights = probs.gather(1, tokens).double()
        mass = weights.cumsum(-1).gather(1, (kept - 1).clamp_(max=vocab - 1)[:, None])[:, 0]
        kept = torch.minimum(kept, _nucleus_size(weights, top_p * mass))
    return _last_kept(largest, kept)


def _top_p(probs: Tensor, values: Tensor, top_p: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """As `_top_k`, for top-p alone, without sorting the vocabulary.

    A token of a probability below (1 - p) / vocab is not in the nucleus: all of its kind together have less than 1 - p.
    The others are weighed in buckets of their scores; only the bucket in which the nucleus ends is sorted.
    """
    num_rows, vocab = probs.shape
    largest = scores.amax(-1)
    share = (1 - top_p.double()) / vocab / probs.amax(-1)
    depth = (1e-3 - share.log()).float()  # The margin covers rounding.
    places = (scores >= (largest - depth)[:, None]).view(-1).nonzero()[:, 0]
    row = places // vocab
    weights = probs.reshape(-1).index_select(0, places).double()
    below = largest.index_select(0, row) - scores.reshape(-1).index_select(0, places)
    bucket = below.mul_((_NUM_BUCKETS / depth).index_select(0, row)).long().clamp_(0, _NUM_BUCKETS - 1)
    mass = torch.bincount(row * _NUM_BUCKETS + bucket, weights, minlength=num_rows * _NUM_BUCKETS)
    mass = mass.view(num_rows, _NUM_BUCKETS).cumsum(-1)
    last = (mass < top_p[:, None]).sum(-1, keepdim=True).clamp_(max=_NUM_BUCKETS - 1)
    above = mass.gather(1, (last - 1).clamp_(min=0)).masked_fill_(last == 0, 0.0)
    # The tokens of that bucket side by side, padded with -inf.
    chosen = (bucket == last[:, 0].index_select(0, row)).nonzero()[:, 0]
    row, weights = row[chosen], weights[chosen]
    counts = torch.bincount(row, minlength=num_rows)
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    shape = (num_rows, max(1, int(counts.max())))
    candidates = values.new_full(shape, float("-inf"))
    candidates[row, place] = values.reshape(-1)[places[chosen]]
    padded = weights.new_zeros(shape)
    padded[row, place] = weights
    candidates, order = candidates.sort(descending=True)
    kept = _nucleus_size(padded.gather(1, order), top_p.double() - above[:, 0])
    return _last_kept(candidates, kept.clamp(max=counts))


def _nucleus_size(weights: Tensor, target: Tensor) -> Tensor:
    """How many of ``weights`` [rows, n], sorted, are needed to reach ``target`` [rows]: those before which it is not."""
    return ((weights.cumsum(-1) - weights) < target[:, None]).sum(-1)


def _last_kept(largest: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The last kept value of ``largest`` [rows, n], sorted, and how many of its equals are kept (-1: all of them)."""
    kept = kept.clamp(min=1)[:, None]
    smallest = largest.gather(1, kept - 1)
    following = largest.gather(1, kept.clamp(max=largest.shape[1] - 1))
    is_cut = (following == smallest) & (kept < largest.shape[1])
    room = kept - (largest > smallest).sum(-1, keepdim=True)
    return smallest[:, 0], room.masked_fill_(~is_cut, -1)[:, 0]


def truncation_mask(scaled: Tensor, top_k: int, top_p: float) -> Tensor | None:
    """Which tokens top-k and top-p keep: [rows, vocab] bool, or None for all.

    Args:
        scaled: [rows, vocab] logits / temperature.
    """
    if not 0 < top_k < scaled.shape[1] and top_p >= 1:
        return None
    ones = torch.ones(len(scaled))
    kept = keep_largest(scaled.softmax(-1), scaled, scaled, ones.int() * top_k, ones * top_p, ones * 0)
    return kept > 0
