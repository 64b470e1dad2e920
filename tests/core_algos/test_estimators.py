"""Advantage estimators against hand-computed answers, naive loops and invariances."""

import math

import numpy as np
import pytest
import torch

from burnish.config import AlgoConfig
from burnish.core_algos.estimators import (
    ADV_ESTIMATORS,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from burnish.core_algos.scans import generalized_advantage
from burnish.utils.errors import ConfigError, TrainingError
from tests.core_algos import oracles
from tests.core_algos.oracles import RaggedBatch, ragged_batch

GAMMA, LAM = 0.97, 0.9
ESTIMATORS = {
    "gae": lambda b: compute_gae_advantage_return(b.rewards, b.values, b.mask, GAMMA, LAM),
    "grpo": lambda b: compute_grpo_outcome_advantage(b.rewards, b.mask, b.uids),
    "dr_grpo": lambda b: compute_grpo_outcome_advantage(b.rewards, b.mask, b.uids, norm_adv_by_std_in_grpo=False),
    "rloo": lambda b: compute_rloo_outcome_advantage(b.rewards, b.mask, b.uids),
    "reinforce_plus_plus": lambda b: compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask, gamma=GAMMA),
}
GROUP_ESTIMATORS = {
    "grpo": lambda r, m, i, **k: compute_grpo_outcome_advantage(r, m, i, **k),
    "dr_grpo": lambda r, m, i, **k: compute_grpo_outcome_advantage(r, m, i, norm_adv_by_std_in_grpo=False, **k),
    "rloo": lambda r, m, i, **k: compute_rloo_outcome_advantage(r, m, i, **k),
}


def scored(scores: list[float], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two tokens, the second one scored."""
    rewards = torch.tensor([[0.0, score] for score in scores], dtype=dtype)
    return rewards, torch.ones(len(scores), 2, dtype=torch.bool)


def wide(matrix: list[list[float]]) -> torch.Tensor:
    return torch.tensor(matrix, dtype=torch.float64)


def expected(name: str, b: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    r, v, m = b.rewards.tolist(), b.values.tolist(), b.mask.tolist()
    if name == "gae":
        raw = oracles.gae(r, v, m, GAMMA, LAM)
        return wide(oracles.whiten(raw, m)), torch.where(b.mask, wide(raw) + b.values, 0.0)
    if name == "reinforce_plus_plus":
        raw = oracles.discounted_returns(r, m, GAMMA)
        return wide(oracles.whiten(raw, m)), wide(raw)
    by_hand = oracles.rloo(r, m, b.uids) if name == "rloo" else oracles.grpo(r, m, b.uids, by_std=name == "grpo")
    return wide(by_hand), wide(by_hand)


def test_gae_worked_example():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.3, 0.4, 0.5]])
    mask = torch.tensor([[0, 0, 1, 1]])
    unwhitened = generalized_advantage(rewards, values, mask.bool(), 0.99, 0.95)
    torch.testing.assert_close(unwhitened[0, 2:], torch.tensor([0.56525, 0.5]))
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.96525, 1.0]]))
    # Two values whiten to +-1/sqrt(2).
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.5**0.5, -(0.5**0.5)]]), atol=1e-4, rtol=0)


def test_grpo_worked_example():
    rewards, mask = scored([1, 0, 1, 0])
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    assert torch.equal(advantages, returns)
    normalised, _ = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4)
    assert normalised[:, 0].tolist() == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)


def test_rloo_worked_example():
    rewards, mask = scored([1, 0, 0, 0.5])
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, ["a", "a", "a", "a"])
    assert advantages[:, 1].tolist() == pytest.approx([1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])


def test_reinforce_plus_plus_worked_example():
    rewards = torch.tensor([[0.0, 9.0, 1.0], [0.5, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0], [0.5, 0.0, 0.0]]
    assert advantages[mask.bool()].tolist() == pytest.approx([-0.57735, 1.1547, -0.57735], abs=1e-4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_equals_the_naive_loop(name, seed):
    b = ragged_batch(seed)
    for got, want in zip(ESTIMATORS[name](b), expected(name, b), strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_long_rows_cross_the_blocks_of_the_scan(name):
    b = ragged_batch(3, width=150)
    for got, want in zip(ESTIMATORS[name](b), expected(name, b), strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_are_fp32_for_narrower_inputs(name, dtype):
    b = ragged_batch(0).map(lambda x: x if x.dtype == torch.bool else x.to(dtype))
    in_float64 = b.map(lambda x: x if x.dtype == torch.bool else x.double())
    for got, want in zip(ESTIMATORS[name](b), ESTIMATORS[name](in_float64), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_changes_nothing(name):
    b = ragged_batch(1)
    rows = len(b.mask)

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros(rows, 5, dtype=x.dtype)], dim=1)

    for got, want in zip(ESTIMATORS[name](b.map(pad)), ESTIMATORS[name](b), strict=True):
        torch.testing.assert_close(got[:, : want.shape[1]], want, atol=1e-10, rtol=1e-10)
        assert not got[:, want.shape[1] :].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_row_order_and_group_interleaving_change_nothing(name):
    b = ragged_batch(2)
    for order in (np.random.default_rng(0).permutation(len(b.mask)), np.argsort(b.uids, kind="stable")):
        shuffled = b.map(lambda x, order=order: x[torch.from_numpy(order)])
        shuffled.uids = b.uids[order]
        for got, want in zip(ESTIMATORS[name](shuffled), ESTIMATORS[name](b), strict=True):
            torch.testing.assert_close(got, want[torch.from_numpy(order)], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_lies_outside_the_mask_is_harmless_and_what_lies_inside_surfaces(name):
    b = ragged_batch(4)
    rubbish = b.map(lambda x: x if x.dtype == torch.bool else torch.where(b.mask, x, math.nan))
    for got, want in zip(ESTIMATORS[name](rubbish), ESTIMATORS[name](b), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    row, token = b.mask.nonzero()[0].tolist()
    b.rewards[row, token] = math.nan
    assert ESTIMATORS[name](b)[0].isnan().any()


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_tool_tokens_are_as_if_they_were_not_there(name):
    b = ragged_batch(5, num_groups=1, group_size=1, width=5)
    b.mask = torch.tensor([[True, True, False, False, True]])
    b.rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]).double()
    without = b.map(lambda x: x[:, [0, 1, 4]])
    for got, want in zip(ESTIMATORS[name](b), ESTIMATORS[name](without), strict=True):
        torch.testing.assert_close(got[:, [0, 1, 4]], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 5, 7, 64])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, 1 / 3])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_equal_rewards_gets_exactly_zero(name, reward, size, dtype):
    rewards, mask = scored([reward] * size + [0.0, 1.0], dtype)
    advantages, _ = GROUP_ESTIMATORS[name](rewards, mask, ["same"] * size + ["mixed"] * 2)
    assert torch.equal(advantages[:size], torch.zeros(size, 2, dtype=dtype))
    assert (advantages[size:] != 0).all()


def test_equal_returns_give_reinforce_plus_plus_exactly_zero():
    rewards, mask = scored([0.2] * 33)
    assert not compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)[0].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_rows_alone_in_their_group_follow_one_rule(name):
    scores = [2.2, -0.3, -2.8, 0.9]
    rewards, mask = scored(scores)
    alone = ["a", "b", "c", "d"]
    allowed = AlgoConfig(allow_single_sample_groups=True)
    assert not GROUP_ESTIMATORS[name](rewards, mask, alone)[0].any()
    assert not GROUP_ESTIMATORS[name](rewards, mask, alone, config=AlgoConfig())[0].any()
    kept, _ = GROUP_ESTIMATORS[name](rewards, mask, alone, config=allowed, num_repeat=1)
    assert kept[:, 0].tolist() == pytest.approx(scores, rel=1e-5)
    # What is left over of a larger group is not a single-sample run.
    assert not GROUP_ESTIMATORS[name](rewards, mask, alone, config=allowed, num_repeat=4)[0].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_ragged_groups_are_each_their_own(name):
    rewards, mask = scored([5.0, 1.0, 0.0, 1.0, 3.0, 2.0])
    advantages, _ = GROUP_ESTIMATORS[name](rewards, mask, ["b", "a", "a", "a", "c", "c"])
    assert not advantages[0].any()
    pair, _ = GROUP_ESTIMATORS[name](rewards[4:], mask[4:], ["c", "c"])
    torch.testing.assert_close(advantages[4:], pair)
    assert advantages[1:4, 0].sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "index",
    [
        np.array(["x", "y", "x", "y"], dtype=object),
        ["x", "y", "x", "y"],
        np.array([7, -1, 7, -1]),
        torch.tensor([3, 900, 3, 900]),
    ],
    ids=["object array", "list", "integer array", "integer tensor"],
)
def test_groups_are_named_by_strings_or_integers(index):
    rewards, mask = scored([1, 0, 0, 1])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize(
    "index", [torch.tensor([0.0, 1.0]), np.array([0.5, 1.0]), np.array(["a", None], dtype=object), ["a", "b", "c"]]
)
def test_an_index_that_names_no_groups_is_refused(index):
    rewards, mask = scored([1, 0])
    with pytest.raises(TrainingError, match="index"):
        compute_grpo_outcome_advantage(rewards, mask, index)


def test_a_mask_that_is_none_is_refused():
    b = ragged_batch(0)
    with pytest.raises(TrainingError, match="response_mask"):
        compute_gae_advantage_return(b.rewards, b.values, b.advantages, GAMMA, LAM)


def test_every_hyper_parameter_counts():
    b = ragged_batch(6)
    gae = [compute_gae_advantage_return(b.rewards, b.values, b.mask, *p)[1] for p in ((1, 1), (0.9, 1), (0.9, 0.5))]
    assert not torch.allclose(gae[0], gae[1])
    assert not torch.allclose(gae[1], gae[2])
    returns = compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask, AlgoConfig(gamma=0.5))[1]
    assert torch.equal(returns, compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask, gamma=0.5)[1])
    assert not torch.allclose(returns, compute_reinforce_plus_plus_outcome_advantage(b.rewards, b.mask)[1])
    small, large = (compute_grpo_outcome_advantage(b.rewards, b.mask, b.uids, epsilon=e)[0] for e in (1e-6, 1.0))
    assert small.abs().sum() > large.abs().sum()


def test_advantages_and_returns_are_separate_tensors():
    b = ragged_batch(0)
    for estimate in ESTIMATORS.values():
        advantages, returns = estimate(b)
        assert advantages.data_ptr() != returns.data_ptr()


def test_no_gradient_flows_through_an_advantage():
    b = ragged_batch(0)
    b.values.requires_grad_()
    assert not ESTIMATORS["gae"](b)[0].requires_grad


def test_an_unknown_estimator_lists_the_choices():
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator=grpoo.*Did you mean 'grpo'.*gae"):
        get_adv_estimator_fn("grpoo")


def test_a_registered_estimator_is_found_by_its_name():
    @register_adv_est("of_this_test")
    def mine(token_level_rewards, response_mask):
        return token_level_rewards, token_level_rewards

    try:
        assert get_adv_estimator_fn("of_this_test") is mine
    finally:
        del ADV_ESTIMATORS._entries["of_this_test"]
