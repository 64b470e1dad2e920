"""Decode states of random rows, and the end of a step as a loop over them."""

import math
from types import SimpleNamespace

import torch

from burnish.rollout.native.kernels.advance import LENGTH, NON_FINITE, RUNNING, STOP
from burnish.rollout.native.sampler import Draw

IDLE, VOCAB, WINDOW = 4, 11, 6


def decode_state(seed: int, *, rows: int = 40, count: int = 33, device: str = "cpu") -> SimpleNamespace:
    """``rows`` rows, of which the first ``count`` are in use."""
    g = torch.Generator().manual_seed(seed)
    numbers = {
        "tokens": torch.randint(0, VOCAB, (rows,), generator=g),
        "lengths": torch.randint(0, 50, (rows,), generator=g, dtype=torch.int32),
        "remaining": torch.randint(1, 6, (rows,), generator=g, dtype=torch.int32),
        "min_remaining": torch.randint(0, 4, (rows,), generator=g, dtype=torch.int32),
        "status": (torch.rand(rows, generator=g) < 0.2).to(torch.int8) * IDLE,
        "stop_ids": torch.randint(-1, VOCAB, (rows, 3), generator=g, dtype=torch.int32),
        "seen": torch.rand(rows, VOCAB, generator=g) < 0.3,
        "step": torch.zeros(1, dtype=torch.int64),
        "window_tokens": torch.full((WINDOW, rows), -9, dtype=torch.int32),
        "window_log_probs": torch.full((WINDOW, rows), -9.0),
        "window_truncated": torch.full((WINDOW, rows), -9.0),
    }
    return SimpleNamespace(count=count, **{name: tensor.to(device) for name, tensor in numbers.items()})


def drawn(state: SimpleNamespace, seed: int, *, truncated: bool) -> Draw:
    """Random tokens with log-probs, a few of which are NaN."""
    g = torch.Generator().manual_seed(seed)
    device = state.tokens.device
    log_probs = -torch.rand(state.count, generator=g)
    log_probs[torch.rand(state.count, generator=g) < 0.1] = math.nan
    tokens = torch.randint(0, VOCAB, (state.count,), generator=g).to(device)
    log_probs = log_probs.to(device)
    return Draw(tokens, log_probs, log_probs + 0.5 if truncated else None)


def naive_advance(state: SimpleNamespace, draw: Draw) -> None:
    """Row by row."""
    step = int(state.step)
    for row in range(state.count):
        token, log_prob = int(draw.tokens[row]), float(draw.log_probs[row])
        runs = int(state.status[row]) == RUNNING
        state.window_tokens[step, row] = token if runs else -1
        state.window_log_probs[step, row] = log_prob
        if draw.truncated_log_probs is not None:
            state.window_truncated[step, row] = draw.truncated_log_probs[row]
        if not runs:
            continue
        may_stop = int(state.min_remaining[row]) == 0
        state.tokens[row] = token
        state.seen[row, token] = True
        state.lengths[row] += 1
        state.remaining[row] -= 1
        state.min_remaining[row] = max(0, int(state.min_remaining[row]) - 1)
        if not math.isfinite(log_prob):
            state.status[row] = NON_FINITE
        elif may_stop and token in state.stop_ids[row].tolist():
            state.status[row] = STOP
        elif int(state.remaining[row]) == 0:
            state.status[row] = LENGTH
    state.step += 1
