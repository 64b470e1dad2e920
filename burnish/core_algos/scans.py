"""Recurrences that run backwards over tokens, vectorised over rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from burnish.utils.torch_functional import at_least_fp32

_BLOCK = 64
"""Tokens copied time-major at once: a column of a row-major matrix is one cache line per row, a block is not."""


def discounted_sum(
    rewards: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"], gamma: float | int
) -> Float[Tensor, "batch response"]:
    """G_t = r_t + gamma G_{t+1} on tokens of ``mask``, carried across the others; 0 outside the mask."""
    running = at_least_fp32(rewards.new_zeros(len(rewards)))
    sums = torch.empty(rewards.shape, dtype=running.dtype, device=rewards.device)
    for block in _blocks_from_the_end(rewards.shape[1]):
        r, m = _time_major(rewards, block), _time_major(mask, block)
        out = torch.empty_like(r)
        for t in range(len(r) - 1, -1, -1):
            running = torch.where(m[t], r[t] + gamma * running, running)
            out[t] = running
        sums[:, block] = out.T
    return torch.where(mask, sums, 0.0)


def generalized_advantage(
    rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    gamma: float | int,
    lam: float | int,
) -> Float[Tensor, "batch response"]:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t, where next is the next token of ``mask``.

    Not whitened; outside the mask the carried A_next, which is finite whatever the inputs hold there.
    """
    advantage = at_least_fp32(rewards.new_zeros(len(rewards)))
    next_value = advantage
    advantages = torch.empty(rewards.shape, dtype=advantage.dtype, device=rewards.device)
    for block in _blocks_from_the_end(rewards.shape[1]):
        r, v, m = _time_major(rewards, block), _time_major(values, block), _time_major(mask, block)
        out = torch.empty_like(r)
        for t in range(len(r) - 1, -1, -1):
            delta = r[t] - v[t] + gamma * next_value
            advantage = torch.where(m[t], delta + gamma * lam * advantage, advantage)
            next_value = torch.where(m[t], v[t], next_value)
            out[t] = advantage
        advantages[:, block] = out.T
    return advantages


def _blocks_from_the_end(num_tokens: int) -> Iterator[slice]:
    for stop in range(num_tokens, 0, -_BLOCK):
        yield slice(max(stop - _BLOCK, 0), stop)


def _time_major(matrix: Tensor, block: slice) -> Tensor:
    # Two copies are four times as fast as one: torch transposes quickly only what is contiguous as a whole.
    columns = matrix[:, block].contiguous().T.contiguous()
    return columns if columns.dtype == torch.bool else at_least_fp32(columns)
