"""What the end of a decode step does to each row."""

import math
from types import SimpleNamespace

import torch

from burnish.rollout.native.kernels.advance import LENGTH, NON_FINITE, RUNNING, STOP, advance
from burnish.rollout.native.rows import Status
from burnish.rollout.native.sampler import Draw
from tests.rollout.advance_cases import IDLE, decode_state, drawn, naive_advance


def test_statuses_are_those_of_the_rows():
    names = {"RUNNING": RUNNING, "STOP": STOP, "LENGTH": LENGTH, "NON_FINITE": NON_FINITE, "IDLE": IDLE}
    assert {status.name: status.value for status in Status} == names


def test_a_window_of_steps_does_what_a_plain_loop_does():
    for seed in range(20):
        state, expected = decode_state(seed), decode_state(seed)
        for step in range(5):
            draw = drawn(state, seed * 10 + step, truncated=seed % 2 == 0)
            advance(state, state.count, draw)
            naive_advance(expected, draw)
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(getattr(state, name), value, rtol=0, atol=0, equal_nan=True, msg=name)


def one_row(**values) -> SimpleNamespace:
    state = decode_state(0, rows=1, count=1)
    for name, value in {"status": RUNNING, "remaining": 5, "min_remaining": 0, "lengths": 9, **values}.items():
        getattr(state, name).fill_(value)
    state.stop_ids[0] = torch.tensor([7, -1, -1])
    return state


def step(state: SimpleNamespace, token: int, log_prob: float = -1.0) -> int:
    advance(state, 1, Draw(torch.tensor([token]), torch.tensor([log_prob]), None))
    return int(state.status)


def test_a_running_row_takes_over_its_token():
    state = one_row(min_remaining=2)
    assert step(state, 3) == RUNNING
    assert [int(state.tokens), int(state.lengths), int(state.remaining), int(state.min_remaining)] == [3, 10, 4, 1]
    assert state.window_tokens[0].tolist() == [3]
    assert bool(state.seen[0, 3])
    assert int(state.step) == 1


def test_a_row_ends_at_a_stop_token_unless_more_tokens_had_to_follow():
    assert step(one_row(), 7) == STOP
    assert step(one_row(remaining=1), 7) == STOP
    assert step(one_row(min_remaining=1), 7) == RUNNING


def test_a_row_ends_when_nothing_remains_and_where_its_log_prob_is_not_finite():
    assert step(one_row(remaining=1), 3) == LENGTH
    for log_prob in (math.nan, math.inf, -math.inf):
        state = one_row(remaining=1)
        assert step(state, 7, log_prob) == NON_FINITE
        assert state.window_tokens[0].tolist() == [7]


def test_a_row_that_does_not_run_stays_as_it_is():
    for status in (STOP, LENGTH, NON_FINITE, IDLE):
        state = one_row(status=status, tokens=2)
        state.seen.zero_()
        assert step(state, 3, math.nan) == status
        assert [int(state.tokens), int(state.lengths), int(state.remaining)] == [2, 9, 5]
        assert state.window_tokens[0].tolist() == [-1]
        assert not state.seen.any()
        assert int(state.step) == 1
