"""Advantage estimators against answers worked out by hand, and every setting of theirs has an effect."""

import pytest
import torch

from burnish.config import AlgoConfig
from burnish.core_algos.estimators import (
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from burnish.core_algos.scans import generalized_advantage

HALF_ROOT = 0.5**0.5


def outcomes(scores: list[float], lengths: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and mask of rows of these lengths (two tokens each, if not given), the last token scored."""
    ends = torch.tensor(lengths or [2] * len(scores))
    rewards = torch.zeros(len(scores), int(ends.max()), dtype=torch.float64)
    rewards[torch.arange(len(scores)), ends - 1] = torch.tensor(scores, dtype=torch.float64)
    return rewards, torch.arange(rewards.shape[1]) < ends[:, None]


def test_gae():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.3, 0.4, 0.5]])
    mask = torch.tensor([[0, 0, 1, 1]])
    unwhitened = generalized_advantage(rewards, values, mask.bool(), 0.99, 0.95)
    torch.testing.assert_close(unwhitened[0, 2:], torch.tensor([0.56525, 0.5]))
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.96525, 1.0]]))
    # Two values whiten to +-1/sqrt(2).
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, HALF_ROOT, -HALF_ROOT]]), atol=1e-4, rtol=0)


def test_grpo():
    rewards, mask = outcomes([1, 0, 1, 0])
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    assert torch.equal(advantages, returns)
    normalised, _ = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4)
    # The variance is 4 * 0.25 / 3.
    assert normalised[:, 0].tolist() == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)


def test_grpo_passk():
    rewards, mask = outcomes([1, 0.25, 0, 1, 1, 0])
    index = ["a"] * 3 + ["tie"] * 3
    advantages, returns = compute_grpo_passk_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.75, 0.75]] + [[0.0, 0.0]] * 5
    assert torch.equal(advantages, returns)
    # Deviations from the mean 5/12 are 7/12, -2/12, -5/12: the variance is 78/144/2.
    normalised, _ = compute_grpo_passk_outcome_advantage(rewards, mask, index)
    assert normalised[:, 0].tolist() == pytest.approx([0.75 / (78 / 288) ** 0.5, 0, 0, 0, 0, 0], rel=1e-5)


def test_rloo():
    rewards, mask = outcomes([1, 0, 0, 0.5])
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, ["a", "a", "a", "a"])
    assert advantages[:, 1].tolist() == pytest.approx([1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])


def test_opo_weighs_by_length():
    rewards, mask = outcomes([1, 0], lengths=[1, 3])
    advantages, returns = compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    assert advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]
    assert torch.equal(advantages, returns)


def test_gpg_makes_up_for_rows_without_a_reward():
    rewards, mask = outcomes([1, 0, 0, 0.5])
    # The mean is 3/8, and two of four rows have a reward: alpha = 2.
    advantages, _ = compute_gpg_outcome_advantage(rewards, mask, ["a"] * 4)
    assert advantages[:, 0].tolist() == [1.25, -0.75, -0.75, 0.25]
    scaled, _ = compute_gpg_outcome_advantage(rewards, mask, ["a"] * 4, f_norm=4.0, alpha=1.0)
    assert scaled[:, 0].tolist() == [0.15625, -0.09375, -0.09375, 0.03125]
    no_reward, mask = outcomes([0, 0])
    assert not compute_gpg_outcome_advantage(no_reward, mask, ["a"] * 2)[0].any()


def test_reinforce_plus_plus():
    rewards = torch.tensor([[0.0, 9.0, 1.0], [0.5, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0], [0.5, 0.0, 0.0]]
    assert advantages[mask.bool()].tolist() == pytest.approx([-0.57735, 1.1547, -0.57735], abs=1e-4)


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    rewards, mask = outcomes([1, 0], lengths=[1, 3])
    # Tokens 0.5, -0.5, -0.5, -0.5: mean -0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25.
    advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, ["a", "a"])
    assert advantages[mask].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-6)
    assert torch.equal(advantages, returns)


def test_remax_subtracts_the_greedy_reward_from_what_is_to_come():
    rewards, mask = torch.tensor([[0.5, 9.0, 1.0], [0.0, 2.0, 0.0]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, torch.tensor([0.75, 3.0]), mask)
    assert returns.tolist() == [[1.5, 0.0, 1.0], [2.0, 2.0, 0.0]]
    assert advantages.tolist() == [[0.75, 0.0, 0.25], [-1.0, -1.0, 0.0]]


def test_gdpo_normalises_each_component_before_they_are_added():
    rewards, mask = outcomes([0, 0], lengths=[1, 1])
    components = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)

    def first_row(weights: list[float] | None, **settings) -> float:
        config = AlgoConfig(gdpo_reward_weights=weights)
        advantages, returns = compute_gdpo_outcome_advantage(
            rewards, mask, ["a", "a"], components, config=config, **settings
        )
        assert torch.equal(advantages, returns)
        assert advantages.sum().item() == pytest.approx(0.0, abs=1e-12)
        return advantages[0, 0].item()

    # Both are +-1/sqrt(2) once normalised, with opposite signs; two tokens whiten to +-1/sqrt(2).
    assert first_row(None, epsilon=0.0) == 0.0
    assert first_row([1.0, 0.5]) == pytest.approx(HALF_ROOT, rel=1e-6)
    assert first_row([0.5, 1.0]) == pytest.approx(-HALF_ROOT, rel=1e-6)
    # Only centred, the second one is four times the first.
    assert first_row([1.0, 0.5], norm_adv_by_std_in_grpo=False) == pytest.approx(-HALF_ROOT, rel=1e-6)


def test_gdpo_leaves_out_groups_in_which_no_weighted_component_varies():
    rewards, mask = outcomes([0] * 5, lengths=[1] * 5)
    components = torch.tensor([[1.0, 7.0], [0.0, 7.0], [0.5, 7.0], [0.1, 3.0], [0.1, 5.0]], dtype=torch.float64)
    index = ["a", "a", "a", "b", "b"]
    alone, _ = compute_gdpo_outcome_advantage(rewards[:3], mask[:3], index[:3], components[:3])
    ignored, _ = compute_gdpo_outcome_advantage(
        rewards, mask, index, components, config=AlgoConfig(gdpo_reward_weights=[1.0, 0.0])
    )
    torch.testing.assert_close(ignored[:3], alone)
    assert not ignored[3:].any()
    counted, _ = compute_gdpo_outcome_advantage(rewards, mask, index, components)
    assert (counted[3:] != 0).all()


@pytest.fixture
def mixed() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    rewards, mask = outcomes([1.0, 0.25, 0.0, 0.5, 0.0, 2.0], lengths=[2, 3, 1, 3, 2, 2])
    rewards[:, 0] += 0.125
    return rewards, mask, ["a", "a", "a", "b", "b", "b"]


def test_gamma_and_lambda_of_gae_count(mixed):
    rewards, mask, _ = mixed
    values = torch.linspace(-1, 1, rewards.numel(), dtype=torch.float64).reshape(rewards.shape)
    one, other, third = (
        compute_gae_advantage_return(rewards, values, mask, gamma, lam)[1]
        for gamma, lam in ((1, 1), (0.9, 1), (0.9, 0.5))
    )
    assert not torch.allclose(one, other)
    assert not torch.allclose(other, third)


def test_gamma_of_reinforce_plus_plus_is_given_or_that_of_the_configuration(mixed):
    rewards, mask, _ = mixed
    by_config = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, AlgoConfig(gamma=0.5))[1]
    assert torch.equal(by_config, compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)[1])
    assert not torch.allclose(by_config, compute_reinforce_plus_plus_outcome_advantage(rewards, mask)[1])
    assert compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0)[1][1, 0] == rewards[1, 0]


@pytest.mark.parametrize("estimator", [compute_grpo_outcome_advantage, compute_grpo_passk_outcome_advantage])
def test_epsilon_and_the_deviation_count(estimator, mixed):
    default = estimator(*mixed)[0]
    assert default.abs().sum() > estimator(*mixed, epsilon=1.0)[0].abs().sum()
    assert not torch.allclose(default, estimator(*mixed, norm_adv_by_std_in_grpo=False)[0])


def test_epsilon_of_gdpo_counts(mixed):
    rewards, mask, index = mixed
    components = torch.stack([rewards.sum(-1), rewards[:, 0] * torch.arange(6)], dim=-1)
    small, large = (
        compute_gdpo_outcome_advantage(rewards, mask, index, components, epsilon=epsilon)[0] for epsilon in (1e-6, 1.0)
    )
    assert not torch.allclose(small, large)


def test_f_norm_and_alpha_of_gpg_count(mixed):
    default = compute_gpg_outcome_advantage(*mixed)[0]
    torch.testing.assert_close(compute_gpg_outcome_advantage(*mixed, f_norm=2.0)[0], default / 2)
    torch.testing.assert_close(compute_gpg_outcome_advantage(*mixed, alpha=3.0)[0], default * 3)
