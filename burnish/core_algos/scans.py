"""Recurrences that run backwards over tokens, vectorised over rows, in blocks that stay in the cache."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from burnish.core_algos.blocks import over_rows, zeroed_outside
from burnish.utils.torch_functional import at_least_fp32

_SCANNED_ROWS, _SCANNED_TOKENS = 2048, 128
"""Size of a block that is scanned token by token: an operation takes one token of all its rows."""


def discounted_sum(
    rewards: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"], gamma: float | int
) -> Float[Tensor, "batch response"]:
    """G_t = r_t + gamma G_{t+1} on tokens of ``mask``, carried across the others; 0 outside the mask."""
    sums = at_least_fp32(torch.empty_like(rewards))

    def scan(rows: slice) -> None:
        running = sums.new_zeros(rows.stop - rows.start)
        for tokens in _blocks_from_the_end(rewards.shape[1]):
            m = mask[rows, tokens]
            r = zeroed_outside(m, rewards[rows, tokens])
            inside = _time_major(_as_numbers(m, r))
            summed = _time_major(r)
            running = _recur(summed, _decay(inside, gamma), running)
            sums[rows, tokens] = _row_major(summed.mul_(inside))

    def sum_up(rows: slice) -> None:
        sums[rows] = zeroed_outside(mask[rows], rewards_to_go(rewards[rows], mask[rows]))

    if gamma == 1:
        over_rows(sum_up, sums)
    else:
        over_rows(scan, sums, _SCANNED_ROWS)
    return sums


def generalized_advantage(
    rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    gamma: float | int,
    lam: float | int,
) -> Float[Tensor, "batch response"]:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t, where next is the next token of ``mask``.

    Not whitened; finite outside the mask too, whatever the inputs hold there.

    With c_t = gamma V_t + gamma lam A_t, what the token before t bootstraps from, A_t = r_t - V_t + c_next. That makes
    c_t = gamma lam r_t + gamma (1 - lam) V_t + gamma lam c_next the only recurrence.
    """
    advantages = at_least_fp32(torch.empty_like(rewards))

    def scan(rows: slice) -> None:
        following = advantages.new_zeros(rows.stop - rows.start)
        for tokens in _blocks_from_the_end(rewards.shape[1]):
            m = mask[rows, tokens]
            r = zeroed_outside(m, rewards[rows, tokens])
            v = zeroed_outside(m, values[rows, tokens]).to(r.dtype)
            bootstraps = _time_major(torch.add(gamma * lam * r, v, alpha=gamma * (1 - lam)))
            first = _recur(bootstraps, _decay(_time_major(_as_numbers(m, v)), gamma * lam), following)
            block = r.sub_(v)
            block[:, :-1] += _row_major(bootstraps)[:, 1:]
            block[:, -1] += following
            advantages[rows, tokens] = block
            following = first

    over_rows(scan, advantages, _SCANNED_ROWS)
    return advantages


def rewards_to_go(
    rewards: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """G_t = sum of the rewards of ``mask`` from t on, at every token; the first entry of a row is its sum."""
    # Once masked nothing depends on the mask any more, and a running sum along the rows is faster than the recurrence.
    return zeroed_outside(mask, rewards).flip(1).cumsum(dim=1).flip(1)


def _recur(x: Tensor, factor: Tensor, last: Tensor) -> Tensor:
    """y_t = x_t + factor_t y_{t+1} over the first axis, in place of x, with ``last`` after its end; a copy of y_0."""
    for y, f in zip(reversed(x.unbind()), reversed(factor.unbind()), strict=True):
        last = torch.addcmul(y, f, last, out=y)
    return last.clone()


def _decay(inside: Tensor, decay: float | int) -> Tensor:
    """``decay`` inside the mask; 1 outside, where what comes after is carried as it is."""
    return torch.add(1 - inside, inside, alpha=decay)


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """The mask as 0 and 1; by way of bytes, from which torch converts several at a time."""
    return mask.view(torch.uint8).to(like.dtype)


def _time_major(block: Tensor) -> Tensor:
    return block.T.contiguous()


def _row_major(block: Tensor) -> Tensor:
    # Transposed as a whole, and then copied to where it belongs: both are fast, to do it at once is not.
    return block.T.contiguous()


def _blocks_from_the_end(num_tokens: int) -> Iterator[slice]:
    for stop in range(num_tokens, 0, -_SCANNED_TOKENS):
        yield slice(max(stop - _SCANNED_TOKENS, 0), stop)
