"""The end of a decode step in one program: it is a few kilobytes of work, and all of it must see the same step."""

import triton
import triton.language as tl

from burnish.rollout.native.kernels import advance as plain
from burnish.rollout.native.sampler import Draw

_MAX_BLOCK = 1024


def advance(state: plain.AdvancingState, n: int, draw: Draw) -> None:
    """See `burnish.rollout.native.kernels.advance.advance`."""
    truncated = draw.truncated_log_probs
    seen = state.seen
    _advance[(1,)](
        state.tokens,
        state.lengths,
        state.remaining,
        state.min_remaining,
        state.status,
        state.stop_ids,
        state.status if seen is None else seen,
        state.step,
        state.window_tokens,
        state.window_log_probs,
        state.window_truncated,
        draw.tokens,
        draw.log_probs,
        draw.log_probs if truncated is None else truncated,
        n,
        state.window_tokens.shape[0],
        state.window_tokens.stride(0),
        state.stop_ids.stride(0),
        0 if seen is None else seen.stride(0),
        NUM_STOPS=state.stop_ids.shape[1],
        HAS_SEEN=seen is not None,
        HAS_TRUNCATED=truncated is not None,
        RUNNING=plain.RUNNING,
        STOP=plain.STOP,
        LENGTH=plain.LENGTH,
        NON_FINITE=plain.NON_FINITE,
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(n)),
        num_warps=8,
    )


@triton.jit
def _advance(
    tokens,
    lengths,
    remaining,
    min_remaining,
    status,
    stop_ids,
    seen,
    step,
    window_tokens,
    window_log_probs,
    window_truncated,
    drawn_tokens,
    drawn_log_probs,
    drawn_truncated,
    n,
    window,
    window_stride,
    stop_stride,
    seen_stride,
    NUM_STOPS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_TRUNCATED: tl.constexpr,
    RUNNING: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    NON_FINITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    now = tl.load(step)
    place = now * window_stride
    num_written = tl.where(now < window, n, 0)  # A step beyond the window writes nothing into it.
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < n
        old_status = tl.load(status + row, live, -1)
        running = live & (old_status == RUNNING)
        token = tl.load(drawn_tokens + row, live, 0)
        log_prob = tl.load(drawn_log_probs + row, live, 0.0)
        in_window = row < num_written
        tl.store(window_tokens + place + row, tl.where(running, token, -1).to(tl.int32), in_window)
        tl.store(window_log_probs + place + row, log_prob, in_window)
        if HAS_TRUNCATED:
            truncated = tl.load(drawn_truncated + row, live, 0.0)
            tl.store(window_truncated + place + row, truncated, in_window)
        if HAS_SEEN:
            tl.store(seen + row.to(tl.int64) * seen_stride + token, tl.full((BLOCK,), 1, tl.int1), running)
        left_minimum = tl.load(min_remaining + row, live, 0)
        is_stop = tl.zeros((BLOCK,), tl.int1)
        for stop in tl.static_range(NUM_STOPS):
            stop_id = tl.load(stop_ids + row * stop_stride + stop, live, -1)
            is_stop = is_stop | (stop_id == token)
        is_stop = is_stop & (left_minimum <= 0)
        left = tl.load(remaining + row, live, 0) - 1
        is_finite = tl.abs(log_prob) < float("inf")  # False for NaN.
        ended = tl.where(left <= 0, LENGTH, RUNNING)
        ended = tl.where(is_stop, STOP, ended)
        ended = tl.where(is_finite, ended, NON_FINITE)
        tl.store(status + row, ended.to(tl.int8), running)
        tl.store(tokens + row, token, running)
        tl.store(lengths + row, tl.load(lengths + row, live, 0) + 1, running)
        tl.store(remaining + row, left, running)
        tl.store(min_remaining + row, tl.maximum(left_minimum - 1, 0), running)
    tl.debug_barrier()  # No warp may change the step before every warp has read it.
    tl.store(step, now + 1)
