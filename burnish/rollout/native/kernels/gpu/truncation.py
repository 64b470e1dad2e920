"""What top-k, top-p and min-p keep, on a GPU: exact, in a handful of passes over the vocabulary, no host involved.

Top-k and top-p keep a first part of the tokens ordered by value, of equal ones the lower id first, so what they keep is
given by its last token: a value and an id. The value is bracketed by passes that count, and weigh, what is above some
edges; when few tokens are left in the bracket, they are collected and one program a row finds the last one among them by
bisection over the bits of the values. Rows that too many tokens of one value keep from getting that far (or that combine
a top-k above half the capacity with top-p) bisect over the whole vocabulary, which is slow, and rare.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.rollout.native.sampler import SamplingRows

CAPACITY = 1024
_NUM_EDGES = 8
_NUM_PASSES = 4


class Kept(NamedTuple):
    """What each row keeps: tokens above the threshold, those that equal it up to an id, and all that min-p leaves."""

    sums: Tensor
    """fp32 [rows, chunks], of exp((value - the row's largest) / temperature) over what is kept."""
    thresholds: Tensor
    """fp32 [rows]."""
    last_tokens: Tensor
    """int32 [rows]."""
    min_p: Tensor
    """fp32 [rows]; 0 for greedy rows."""


class _Search(NamedTuple):
    """The state of the search in each row: [rows] each."""

    largest: Tensor  # fp32, the largest value.
    low: Tensor  # fp32: the last kept token is in [low, high).
    high: Tensor
    above_count: Tensor  # int32: tokens at or above high.
    above_mass: Tensor  # float64, their weight.
    inside: Tensor  # int32: tokens in the bracket; the number of tokens that are, or would have to be, collected.
    top_k: Tensor  # int32: tokens to keep; 0 where top-p alone decides.
    target: Tensor  # float64: mass of the nucleus where top-p alone decides.
    top_p: Tensor  # fp32; 1 for greedy rows.


def find_kept(
    values: Tensor, rows: SamplingRows, maxima: Tensor, sums: Tensor, *, block: int, capacity: int = CAPACITY
) -> Kept:
    """Which tokens each row keeps, and how much weight they have.

    Args:
        values: fp32 [rows, vocab], contiguous, without -0.
        maxima, sums: fp32 [rows, chunks], see `burnish.rollout.native.kernels.gpu.sampling.Chunks`.
        block: tokens a chunk.
        capacity: tokens that are collected at most, a power of two.
    """
    num_rows, vocab = values.shape
    num_chunks, device = maxima.shape[1], values.device
    f32, f64, i32 = torch.float32, torch.float64, torch.int32
    dtypes = (f32, f32, f32, i32, f64, i32, i32, f64, f32)
    search = _Search(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))
    kept = Kept(
        torch.empty(num_rows, num_chunks, dtype=f32, device=device),
        *(torch.empty(num_rows, dtype=dtype, device=device) for dtype in (f32, i32, f32)),
    )
    counts = torch.empty(num_rows, num_chunks, _NUM_EDGES, dtype=i32, device=device)
    masses = torch.empty(num_rows, num_chunks, _NUM_EDGES, dtype=f32, device=device)
    edges = torch.empty(num_rows, _NUM_EDGES, dtype=f32, device=device)
    collected = torch.empty(num_rows, dtype=i32, device=device)
    candidates = torch.empty(num_rows, capacity, dtype=f32, device=device)
    candidate_ids = torch.empty(num_rows, capacity, dtype=i32, device=device)
    heat, chunk_grid, padded = rows.temperature, (num_chunks, num_rows), triton.next_power_of_2(num_chunks)
    _begin[(num_rows,)](
        heat, rows.top_k, rows.top_p, rows.min_p, maxima, sums, *search, kept.min_p, collected, vocab, num_chunks,
        CAPACITY=capacity, CHUNKS=padded,
    )  # fmt: skip
    for _ in range(_NUM_PASSES):
        _split[chunk_grid](
            values, heat, search.largest, search.low, search.high, search.inside, edges, counts, masses, vocab,
            CAPACITY=capacity, EDGES=_NUM_EDGES, BLOCK=block, num_warps=8,
        )  # fmt: skip
        _narrow[(num_rows,)](
            edges, counts, masses, *search, num_chunks, CAPACITY=capacity, EDGES=_NUM_EDGES, CHUNKS=padded
        )
    _collect[chunk_grid](
        values, search.low, search.high, search.inside, collected, candidates, candidate_ids, vocab,
        CAPACITY=capacity, BLOCK=block, num_warps=8,
    )  # fmt: skip
    _finish[(num_rows,)](
        candidates, candidate_ids, collected, heat, *search, kept.thresholds, kept.last_tokens, vocab,
        CAPACITY=capacity, num_warps=4,
    )  # fmt: skip
    _finish_slowly[(num_rows,)](
        values, heat, *search, kept.thresholds, kept.last_tokens, vocab,
        CAPACITY=capacity, BLOCK=block, num_warps=8,
    )  # fmt: skip
    _weigh[chunk_grid](
        values, heat, search.largest, kept.thresholds, kept.last_tokens, kept.min_p, kept.sums, vocab,
        BLOCK=block, num_warps=8,
    )  # fmt: skip
    return kept


@triton.jit
def inverse_temperature(temperature):
    """`burnish.rollout.native.sampler.inverse_temperature` of one row."""
    return tl.where(temperature == 0, 1.0, tl.minimum(tl.math.div_rn(1.0, temperature), 1e30))


@triton.jit
def is_kept(x, weight, token, threshold, last_token, min_p):
    """Whether tokens of values ``x`` and weights relative to the largest are kept."""
    return ((x > threshold) | ((x == threshold) & (token <= last_token))) & (weight >= min_p)


@triton.jit
def _order(x):
    """int32 in the order of the floats ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _begin(
    temperature, top_k, top_p, min_p, maxima, sums,
    largest_out, low_out, high_out, above_count, above_mass, inside_out, count_out, target_out, top_p_out,
    min_p_out, collected, vocab, num_chunks,
    CAPACITY: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The first bracket of a row."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    inverse = inverse_temperature(heat)
    is_greedy = heat == 0
    chunk = tl.arange(0, CHUNKS)
    live = chunk < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunk, live, float("-inf"))
    largest = tl.max(maximum, 0)
    weight = tl.load(sums + row * num_chunks + chunk, live, 0.0).to(tl.float64)
    total = tl.sum(weight * tl.exp(((maximum - largest) * inverse).to(tl.float64)), 0)
    count = tl.load(top_k + row)
    count = tl.where(is_greedy | (count < 0) | (count >= vocab), 0, count)
    nucleus = tl.where(is_greedy, 1.0, tl.load(top_p + row))
    # A token of a probability below (1 - p) / vocab is not in the nucleus: all of its kind together have less than 1 - p.
    share = tl.log((1.0 - nucleus.to(tl.float64)) * total / vocab) - 1e-3
    # A token of weight e^-60 is never drawn: for a vocabulary of a million all of these have less than 10^-20.
    depth = tl.where((count == 0) & (nucleus < 1), share, -60.0).to(tl.float32)
    is_active = (count > 0) | (nucleus < 1)
    tl.store(largest_out + row, largest)
    # Rounded down; a token more in the bracket does no harm.
    low = largest + tl.maximum(depth, -60.0) * tl.math.div_rn(1.0, inverse) - tl.abs(largest) * 1e-6
    tl.store(low_out + row, low)
    tl.store(high_out + row, float("inf"))
    tl.store(above_count + row, 0)
    tl.store(above_mass + row, total * 0)
    tl.store(inside_out + row, tl.where(is_active, vocab + CAPACITY, 0))
    tl.store(count_out + row, count)
    tl.store(target_out + row, nucleus.to(tl.float64) * total)
    tl.store(top_p_out + row, nucleus)
    tl.store(min_p_out + row, tl.where(is_greedy, 0.0, tl.load(min_p + row)))
    tl.store(collected + row, 0)


@triton.jit
def _split(
    values, temperature, largest_in, low_in, high_in, inside, edges, counts, masses, vocab,
    CAPACITY: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts and weighs the tokens of a chunk between each edge and the end of the bracket."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(inside + row) <= CAPACITY:
        return
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * vocab + token, token < vocab, float("-inf"))
    largest, low, high = tl.load(largest_in + row), tl.load(low_in + row), tl.load(high_in + row)
    weight = tl.exp((x - largest) * inverse_temperature(tl.load(temperature + row)))
    out = (row * tl.num_programs(0) + chunk) * EDGES
    for index in tl.static_range(EDGES):
        edge = low + (tl.minimum(high, largest) - low) * (index / EDGES)
        if chunk == 0:
            tl.store(edges + row * EDGES + index, edge)
        is_inside = (x >= edge) & (x < high)
        tl.store(counts + out + index, tl.sum(is_inside.to(tl.int32), 0))
        tl.store(masses + out + index, tl.sum(tl.where(is_inside, weight, 0.0), 0))


@triton.jit
def _narrow(
    edges, counts, masses,
    largest_in, low_out, high_out, above_count_out, above_mass_out, inside_out, count_in, target_in, top_p_in,
    num_chunks,
    CAPACITY: tl.constexpr, EDGES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The part of the bracket that holds the last kept token becomes the bracket."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(inside_out + row) <= CAPACITY:
        return
    wanted = tl.load(count_in + row)
    # All that top-k keeps is collected where top-p has to look among it; that takes a capacity with room for it.
    is_small = (wanted > 0) & (wanted <= CAPACITY // 2)
    if (wanted > 0) & (is_small == 0) & (tl.load(top_p_in + row) < 1):
        return
    chunk, edge = tl.arange(0, CHUNKS), tl.arange(0, EDGES)
    place = (row * num_chunks + chunk[:, None]) * EDGES + edge[None, :]
    live = (chunk[:, None] < num_chunks) & (edge[None, :] >= 0)
    count = tl.sum(tl.load(counts + place, live, 0), 0)
    mass = tl.sum(tl.load(masses + place, live, 0.0).to(tl.float64), 0)
    above_count, above_mass = tl.load(above_count_out + row), tl.load(above_mass_out + row)
    by_mass = (above_mass + mass >= tl.load(target_in + row)) & (wanted == 0)
    is_reached = by_mass | ((above_count + count >= wanted) & (wanted > 0))
    chosen = tl.max(tl.where(is_reached, edge, 0), 0)
    inside = tl.sum(tl.where(edge == chosen, count, 0), 0)
    over_count = tl.sum(tl.where(edge == chosen + 1, count, 0), 0)
    over_mass = tl.sum(tl.where(edge == chosen + 1, mass, 0.0), 0)
    is_last = chosen == EDGES - 1
    new_low = tl.load(edges + row * EDGES + chosen)
    new_high = tl.load(edges + row * EDGES + chosen + 1, is_last == 0, 0.0)
    new_high = tl.where(is_last, tl.load(high_out + row), new_high)
    inside -= over_count
    above_count += over_count
    above_mass += over_mass
    is_collecting_all = is_small & (inside + above_count <= CAPACITY)
    inside = tl.where(is_small, inside + above_count, inside)
    tl.store(low_out + row, new_low)
    tl.store(high_out + row, tl.where(is_collecting_all, float("inf"), new_high))
    tl.store(above_count_out + row, tl.where(is_collecting_all, 0, above_count))
    tl.store(above_mass_out + row, tl.where(is_collecting_all, 0.0, above_mass))
    tl.store(inside_out + row, inside)


@triton.jit
def _collect(
    values, low_in, high_in, inside, collected, candidates, candidate_ids, vocab,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects the tokens of the bracket, in any order."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    size = tl.load(inside + row)
    if (size == 0) | (size > CAPACITY):
        return
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * vocab + token, token < vocab, float("-inf"))
    is_inside = (x >= tl.load(low_in + row)) & (x < tl.load(high_in + row)) & (token < vocab)
    rank = tl.cumsum(is_inside.to(tl.int32), 0)
    number = tl.sum(is_inside.to(tl.int32), 0)
    if number > 0:
        place = tl.atomic_add(collected + row, number) + rank - 1
        fits = is_inside & (place < CAPACITY)
        tl.store(candidates + row * CAPACITY + place, x, fits)
        tl.store(candidate_ids + row * CAPACITY + place, token, fits)


@triton.jit
def _room(wanted, target, above_count, above_mass, weight, num_equal):
    """How many tokens of one value are kept: as many as are wanted, or as it takes to reach the target."""
    by_mass = tl.minimum(tl.ceil((target - above_mass) / weight), num_equal.to(tl.float64)).to(tl.int32)
    room = tl.where(wanted > 0, wanted - above_count, by_mass)
    return tl.minimum(tl.maximum(room, 1), num_equal)


@triton.jit
def _bisect(order, weight, low, high, wanted, target, above_count, above_mass):
    """The least order above which less than ``wanted`` tokens, or less than ``target``, are; and what is above it."""
    while low < high:
        middle = (low + high) >> 1
        is_above = order > middle
        count = above_count + tl.sum(is_above.to(tl.int32), 0)
        mass = above_mass + tl.sum(tl.where(is_above, weight, 0.0), 0)
        is_enough = ((wanted > 0) & (count < wanted)) | ((wanted == 0) & (mass < target))
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    is_above = order > low
    count = above_count + tl.sum(is_above.to(tl.int32), 0)
    mass = above_mass + tl.sum(tl.where(is_above, weight, 0.0), 0)
    return low, count, mass


@triton.jit
def _finish(
    candidates, candidate_ids, collected, temperature,
    largest_in, low_in, high_in, above_count_in, above_mass_in, inside, count_in, target_in, top_p_in,
    thresholds, last_tokens, vocab,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """The last kept token, found among those that were collected."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(inside + row)
    if size > CAPACITY:
        return
    size = tl.minimum(tl.load(collected + row), CAPACITY)
    if size == 0:  # Nothing truncates, or the row is NaN.
        tl.store(thresholds + row, float("-inf"))
        tl.store(last_tokens + row, vocab)
        return
    place = tl.arange(0, CAPACITY)
    live = place < size
    x = tl.load(candidates + row * CAPACITY + place, live, float("-inf"))
    token = tl.load(candidate_ids + row * CAPACITY + place, live, vocab)
    largest, top_p, wanted = tl.load(largest_in + row), tl.load(top_p_in + row), tl.load(count_in + row)
    weight = tl.exp((x - largest) * inverse_temperature(tl.load(temperature + row)))
    weight = tl.where(live, weight, 0.0).to(tl.float64)
    # Without what is not live, which is below all others.
    order = tl.where(live, _order(x), -0x7FFFFFFF).to(tl.int64)
    low, high = tl.min(tl.where(live, order, 0x7FFFFFFF), 0), tl.max(order, 0)
    above_count, above_mass = tl.load(above_count_in + row), tl.load(above_mass_in + row)
    target = tl.load(target_in + row)
    last, count, mass = _bisect(order, weight, low, high, wanted, target, above_count, above_mass)
    is_equal = order == last
    num_equal = tl.sum(is_equal.to(tl.int32), 0)
    equal_weight = tl.max(tl.where(is_equal, weight, 0.0), 0)
    room = _room(wanted, target, count, mass, equal_weight, num_equal)
    if (wanted > 0) & (top_p < 1):
        target = top_p.to(tl.float64) * (mass + room * equal_weight)
        last, count, mass = _bisect(order, weight, last, high, 0, target, above_count, above_mass)
        is_equal = order == last
        num_equal = tl.sum(is_equal.to(tl.int32), 0)
        equal_weight = tl.max(tl.where(is_equal, weight, 0.0), 0)
        room = _room(0, target, count, mass, equal_weight, num_equal)
    last_token = vocab
    if room < num_equal:
        first = tl.min(token, 0)
        while first < last_token:
            middle = (first + last_token) >> 1
            is_enough = tl.sum((is_equal & (token <= middle)).to(tl.int32), 0) >= room
            last_token = tl.where(is_enough, middle, last_token)
            first = tl.where(is_enough, first, middle + 1)
    tl.store(thresholds + row, tl.min(tl.where(is_equal, x, float("inf")), 0))
    tl.store(last_tokens + row, last_token)


@triton.jit
def _above(values, row, order, largest, inverse, vocab, BLOCK: tl.constexpr):
    """Number and weight of the row's tokens above an order, and number of those at it."""
    count, num_equal, mass = 0, 0, largest.to(tl.float64) * 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(values + row * vocab + token, token < vocab, float("-inf"))
        is_above = (_order(x).to(tl.int64) > order) & (token < vocab)
        is_equal = (_order(x).to(tl.int64) == order) & (token < vocab)
        count += tl.sum(is_above.to(tl.int32), 0)
        num_equal += tl.sum(is_equal.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_above, tl.exp((x - largest) * inverse), 0.0), 0).to(tl.float64)
    return count, mass, num_equal


@triton.jit
def _bisect_row(values, row, low, high, wanted, target, largest, inverse, vocab, BLOCK: tl.constexpr):
    """As `_bisect`, over the whole row."""
    while low < high:
        middle = (low + high) >> 1
        count, mass, _ = _above(values, row, middle, largest, inverse, vocab, BLOCK)
        is_enough = ((wanted > 0) & (count < wanted)) | ((wanted == 0) & (mass < target))
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    count, mass, num_equal = _above(values, row, low, largest, inverse, vocab, BLOCK)
    return low, count, mass, num_equal


@triton.jit
def _finish_slowly(
    values, temperature,
    largest_in, low_in, high_in, above_count_in, above_mass_in, inside, count_in, target_in, top_p_in,
    thresholds, last_tokens, vocab,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last kept token of a row whose bracket has too many of them."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(inside + row) <= CAPACITY:
        return
    largest, top_p, wanted = tl.load(largest_in + row), tl.load(top_p_in + row), tl.load(count_in + row)
    inverse = inverse_temperature(tl.load(temperature + row))
    target = tl.load(target_in + row)
    low, high = _order(tl.load(low_in + row)).to(tl.int64), _order(largest).to(tl.int64)
    last, count, mass, num_equal = _bisect_row(
        values, row, low, high, wanted, target, largest, inverse, vocab, BLOCK
    )  # fmt: skip
    room = _room(wanted, target, count, mass, _weight_of(last, largest, inverse), num_equal)
    if (wanted > 0) & (top_p < 1):
        target = top_p.to(tl.float64) * (mass + room * _weight_of(last, largest, inverse))
        last, count, mass, num_equal = _bisect_row(
            values, row, last, high, 0, target, largest, inverse, vocab, BLOCK
        )  # fmt: skip
        room = _room(0, target, count, mass, _weight_of(last, largest, inverse), num_equal)
    last_token = vocab
    if room < num_equal:
        passed = 0
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(values + row * vocab + token, token < vocab, float("-inf"))
            is_equal = (_order(x).to(tl.int64) == last) & (token < vocab)
            rank = passed + tl.cumsum(is_equal.to(tl.int32), 0)
            last_token = tl.minimum(last_token, tl.min(tl.where(is_equal & (rank == room), token, vocab), 0))
            passed += tl.sum(is_equal.to(tl.int32), 0)
    tl.store(thresholds + row, _value_of(last))
    tl.store(last_tokens + row, last_token)


@triton.jit
def _value_of(order):
    """The float of an order."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(order, largest, inverse):
    """The float64 weight of a token that has this order."""
    return tl.exp((_value_of(order) - largest) * inverse).to(tl.float64)


@triton.jit
def _weigh(
    values, temperature, largest_in, thresholds, last_tokens, min_p, sums, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of what a chunk keeps."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    x = tl.load(values + row * vocab + token, live, float("-inf"))
    weight = tl.exp((x - tl.load(largest_in + row)) * inverse_temperature(tl.load(temperature + row)))
    keep = is_kept(x, weight, token, tl.load(thresholds + row), tl.load(last_tokens + row), tl.load(min_p + row))
    total = tl.sum(tl.where(keep & live, weight, 0.0), 0)
    tl.store(sums + row * tl.num_programs(0) + chunk, total)
