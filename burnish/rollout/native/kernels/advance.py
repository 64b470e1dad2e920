"""The end of a decode step: rows take over their new token, and some of them end."""

from typing import Protocol

import torch
from torch import Tensor

from burnish.rollout.native.sampler import Draw

# What `burnish.rollout.native.rows.Status` names.
RUNNING, STOP, LENGTH, NON_FINITE = 0, 1, 2, 3


class AdvancingState(Protocol):
    """What `advance` reads and writes of a `burnish.rollout.native.rows.DecodeState`."""

    tokens: Tensor
    lengths: Tensor
    remaining: Tensor
    min_remaining: Tensor
    status: Tensor
    stop_ids: Tensor
    seen: Tensor | None
    step: Tensor
    window_tokens: Tensor
    window_log_probs: Tensor
    window_truncated: Tensor


def advance(state: AdvancingState, n: int, draw: Draw) -> None:
    """Gives the running ones of the first ``n`` rows their token, in place.

    The token is written at the window's step and becomes the newest one; one more token is in the cache, one fewer
    remains. A row ends with NON_FINITE where the log-prob is not finite, else with STOP where the token is a stop token
    and none had to follow, else with LENGTH where none remains. Rows that do not run get -1 in the window. The step
    goes up by one.

    Args:
        draw: of ``n`` rows.
    """
    if draw.tokens.is_cuda:
        from burnish.rollout.native.kernels.gpu import advance as gpu

        gpu.advance(state, n, draw)
    else:
        advance_torch(state, n, draw)


def advance_torch(state: AdvancingState, n: int, draw: Draw) -> None:
    """`advance` in plain torch."""
    status, tokens = state.status[:n], draw.tokens
    running = status == RUNNING
    state.window_tokens[:, :n].index_copy_(0, state.step, tokens.int().masked_fill_(~running, -1)[None])
    state.window_log_probs[:, :n].index_copy_(0, state.step, draw.log_probs[None])
    if draw.truncated_log_probs is not None:
        state.window_truncated[:, :n].index_copy_(0, state.step, draw.truncated_log_probs[None])
    if state.seen is not None:
        seen = state.seen[:n]
        seen.scatter_(1, tokens[:, None], seen.gather(1, tokens[:, None]) | running[:, None])
    stops = (state.stop_ids[:n] == tokens[:, None]).any(-1) & (state.min_remaining[:n] <= 0)
    state.tokens[:n] = torch.where(running, tokens, state.tokens[:n])
    state.lengths[:n] += running
    state.remaining[:n] -= running.int()
    state.min_remaining[:n] = (state.min_remaining[:n] - running.int()).clamp_(min=0)
    # From the weakest reason to the strongest.
    status[running & (state.remaining[:n] <= 0)] = LENGTH
    status[running & stops] = STOP
    status[running & ~draw.log_probs.isfinite()] = NON_FINITE
    state.step += 1
