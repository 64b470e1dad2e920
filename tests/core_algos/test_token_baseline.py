"""The optimal token baselines against answers worked out by hand."""

import math

import pytest
import torch

from burnish.core_algos.estimators import (
    compute_optimal_token_baseline_advantage,
    compute_tir_optimal_token_baseline_advantage,
)

ESTIMATORS = [compute_optimal_token_baseline_advantage, compute_tir_optimal_token_baseline_advantage]
both = pytest.mark.parametrize("estimator", ESTIMATORS)

# Two responses of one prompt, of two and three tokens. With sum pi^2 = 0.5, a token of probability 0.5 adds 0.5 to W and
# one of probability 0.25 adds 1: W = [0.5, 1] and [1, 2, 3], while G = [1, 1] and [3.5, 2.5, 0.5].
REWARDS = [[0.0, 1.0, 0.0], [1.0, 2.0, 0.5]]
PROBABILITIES = [[0.5, 0.5, 0.9], [0.25, 0.25, 0.25]]
MASK = [[1, 1, 0], [1, 1, 1]]
# B_0 = (1 * 0.5 + 3.5 * 1) / 1.5 and B_1 = (1 * 1 + 2.5 * 2) / 3; the third token is alone.
B = [8 / 3, 2.0]


def wide(matrix: list[list[float]]) -> torch.Tensor:
    return torch.tensor(matrix, dtype=torch.float64)


def spaced(matrix: list[list[float]], places: list[list[int]], fill: float) -> list[list[float]]:
    """The first entries of each row, moved to these places of a row of six."""
    rows = []
    for row, where in zip(matrix, places, strict=True):
        rows.append([fill] * 6)
        for entry, place in zip(row, where, strict=False):
            rows[-1][place] = entry
    return rows


def estimate(estimator, rewards=REWARDS, probabilities=PROBABILITIES, mask=MASK, index=("a", "a"), **settings):
    log_probs = wide(probabilities).log()
    squares = torch.full_like(log_probs, 0.5)
    return estimator(wide(rewards), wide(mask), list(index), log_probs, squares, **settings)


def near(matrix: list[list[float]]):
    return pytest.approx(wide(matrix).numpy(), abs=1e-7)


@both
def test_each_token_has_the_baseline_of_its_place(estimator):
    advantages, returns = estimate(estimator)
    assert returns.tolist() == [[1.0, 1.0, 0.0], [3.5, 2.5, 0.5]]
    assert advantages.numpy() == near([[1 - B[0], 1 - B[1], 0], [3.5 - B[0], 2.5 - B[1], 0.5]])


@both
def test_beyond_the_second_longest_row_there_is_no_baseline_unless_that_is_switched_off(estimator):
    assert estimate(estimator)[0][1, 2] == 0.5
    without, _ = estimate(estimator, handle_zero_tail=False)
    # Its own baseline: nothing is left but the 1e-8 in the denominator.
    assert without[1, 2].item() == pytest.approx(0.0, abs=1e-8)
    assert torch.equal(without[:, :2], estimate(estimator)[0][:, :2])


@both
def test_rollout_weights_enter_squared(estimator):
    weights = wide([[2.0, 2.0, math.nan], [1.0, 1.0, 1.0]])
    # W of the first row is [2, 4].
    first, second = (1 * 2 + 3.5 * 1) / 3, (1 * 4 + 2.5 * 2) / 6
    advantages, _ = estimate(estimator, rollout_is_weights=weights)
    assert advantages.numpy() == near([[1 - first, 1 - second, 0], [3.5 - first, 2.5 - second, 0.5]])


def test_tokens_of_tools_are_taken_out_before_places_are_compared():
    places = [[0, 4], [1, 2, 5]]
    gaps = {
        "rewards": spaced(REWARDS, places, 7.0),
        "probabilities": spaced(PROBABILITIES, places, 0.1),
        "mask": spaced([[1, 1], [1, 1, 1]], places, 0),
    }
    advantages, returns = estimate(ESTIMATORS[1], **gaps)
    assert advantages.numpy() == near(spaced([[1 - B[0], 1 - B[1]], [3.5 - B[0], 2.5 - B[1], 0.5]], places, 0.0))
    assert returns.tolist() == spaced([[1.0, 1.0], [3.5, 2.5, 0.5]], places, 0.0)
    # On the time axis of the response none of these tokens has a sibling but the end of the second row goes on alone.
    in_place, _ = estimate(ESTIMATORS[0], **gaps)
    assert in_place.numpy() == near(spaced([[0.0, 0.0], [0.0, 0.0, 0.5]], places, 0.0))


def test_a_row_with_gaps_ends_with_its_last_token():
    mask = [[1, 0, 0, 1], [1, 1, 1, 0]]
    rewards = [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 3.0, 0.0]]
    advantages, _ = estimate(ESTIMATORS[0], rewards, [[0.5] * 4] * 2, mask)
    # The first row ends at 4 and the second at 3: only the fourth token is beyond. B_0 = (1 * 0.5 + 3 * 0.5) / 1.
    assert advantages.numpy() == near([[-1.0, 0, 0, 1.0], [1.0, 0.0, 0.0, 0]])


@both
def test_a_group_is_constant_when_all_its_returns_are(estimator):
    equal = [[0.0, 0.7, 0.0], [0.0, 0.0, 0.7]]
    assert not estimate(estimator, equal)[0].any()
    # Equal scores, but not equal returns.
    assert estimate(estimator, [[0.0, 0.75, 0.0], [0.25, 0.0, 0.5]])[0].any()


@both
def test_certain_tokens_leave_rounding_and_rounding_is_no_weight(estimator):
    rewards, mask = torch.tensor([[1.0], [0.0], [0.5]]), torch.ones(3, 1)
    squares = torch.tensor([[1 - 6e-8], [1 + 1.2e-7], [1 - 6e-8]])
    advantages, returns = estimator(rewards, mask, ["a"] * 3, torch.zeros(3, 1), squares)
    assert torch.equal(advantages, returns)


@both
def test_groups_do_not_touch_each_other(estimator):
    alone, _ = estimate(estimator)
    rewards, probabilities, mask = ([*rows, *rows[::-1]] for rows in (REWARDS, PROBABILITIES, MASK))
    scaled = [*REWARDS, *[[5 * r for r in row] for row in REWARDS[::-1]]]
    assert rewards != scaled
    advantages, _ = estimate(estimator, scaled, probabilities, mask, ["a", "a", "b", "b"])
    torch.testing.assert_close(advantages[:2], alone)
    torch.testing.assert_close(advantages[2:], 5 * alone.flip(0))
