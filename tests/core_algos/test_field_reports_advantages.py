"""How advantages go wrong in the field, as small inputs: float noise, rows without siblings."""

import math

import numpy as np
import pytest
import torch

from burnish.config import AlgoConfig, load_config, names
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.groups import Groups
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError
from burnish.utils.torch_functional import masked_var

GROUP_ESTIMATORS = names.GROUP_ADV_ESTIMATORS
FLOATS = [torch.float32, torch.float64]


def batch_of(rewards: torch.Tensor, mask: torch.Tensor, uids: list[str]) -> DataProto:
    """Everything that any estimator reads; what is not a reward is random, and zero outside the mask."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> torch.Tensor:
        values = low + (high - low) * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        return torch.where(mask, values, 0.0).to(rewards.dtype)

    scores = rewards.sum(-1)
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": uniform(-1.0, 1.0),
        "old_log_probs": uniform(-3.0, 0.0),
        "sum_pi_squared": uniform(0.1, 0.9),
        "reward_baselines": torch.zeros_like(scores),
        # Two parts of the reward that vary together.
        "reward_components": torch.stack([scores, 2.0 * scores], dim=-1),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})


def scored(scores: list[float], uids: list[str], dtype: torch.dtype) -> DataProto:
    """Rows of one to five tokens, the last one of each with the score."""
    lengths = torch.tensor([1 + row % 5 for row in range(len(scores))])
    mask = torch.arange(5)[None, :] < lengths[:, None]
    rewards = torch.zeros(len(scores), 5, dtype=dtype)
    rewards[torch.arange(len(scores)), lengths - 1] = torch.tensor(scores, dtype=dtype)
    return batch_of(rewards, mask, uids)


def advantages_of(name: str, data: DataProto, n: int) -> torch.Tensor:
    config = AlgoConfig(gdpo_reward_keys=["score", "double"], gdpo_reward_weights=[1.0, 0.5])
    return compute_advantage(data, name, num_repeat=n, config=config).tensors["advantages"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, 1 / 3])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_groups_of_equal_rewards_get_exactly_zero_whatever_their_size(name, reward, dtype):
    uids = [f"of {size}" for size in range(3, 65) for _ in range(size)]
    data = scored([reward] * len(uids) + [0.0, 0.3, 1.0], [*uids, *["mixed"] * 3], dtype)
    advantages = advantages_of(name, data, 64)
    assert not advantages[: len(uids)].any()
    assert advantages[len(uids) :].any()


@pytest.mark.parametrize("odd_row", [0, 3, 7])
@pytest.mark.parametrize(("many", "odd"), [(0.35, 0.0), (0.4, 1.0), (0.3, 0.9)])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_one_row_that_differs_from_equal_others_gets_a_moderate_advantage(name, many, odd, odd_row):
    scores = [odd if row == odd_row else many for row in range(8)]
    rewards = torch.tensor(scores, dtype=torch.float32)[:, None]
    advantages = advantages_of(name, batch_of(rewards, torch.ones(8, 1, dtype=torch.bool), ["g"] * 8), 8)[:, 0]
    # In deviations, one of N = 8 rows is at most (N - 1) / sqrt(N) = 2.47 away from the mean, and sqrt(N) = 2.83 from the
    # others.
    assert float(advantages.abs().max()) < 2.83
    if name.startswith("rloo"):
        assert advantages[odd_row].item() == pytest.approx(odd - many)
        assert advantages[odd_row - 1].item() == pytest.approx((many - odd) / 7, rel=1e-5)
    if name != "grpo_passk" or odd > many:
        assert math.copysign(1.0, advantages[odd_row].item()) == math.copysign(1.0, odd - many)


@pytest.mark.parametrize("value", [0.1, 1e4 + 0.1, -1e6 - 1 / 3])
@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_a_deviation_of_equal_values_is_real_and_zero_to_rounding(value, count):
    values = torch.full((count,), value)
    deviation = Groups.of(["g"] * count, count, values.device).std(values)
    assert 0.0 <= deviation.item() <= 1e-15 * abs(value)
    assert masked_var(values, torch.ones(count, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_one_sample_per_prompt_is_a_choice_that_has_to_be_made(name):
    overrides = [f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1"]
    if name == "gdpo":
        overrides.append("algorithm.gdpo_reward_keys=[score]")
    with pytest.raises(ConfigError, match=rf"rollout\.n=1: algorithm\.adv_estimator={name} compares the"):
        load_config(overrides)
    allowed = [*overrides, "algorithm.allow_single_sample_groups=true"]
    if name == "grpo_passk":
        with pytest.raises(ConfigError, match="second best"):
            load_config(allowed)
    else:
        assert load_config(allowed).algorithm.adv_estimator == name


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_what_abstained_siblings_left_behind_gets_zero_and_disturbs_no_other_group(name):
    uids = ["a", "a", "a", "b", "c", "c"]
    scores = [1.0, 0.0, 0.4, 5.0, 3.0, 2.0]
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(6, 1, dtype=torch.bool)
    data = batch_of(rewards, mask, uids)
    kept = [0, 1, 2, 4, 5]
    advantages, without = advantages_of(name, data, 3), advantages_of(name, data.select_idxs(kept), 3)
    assert not advantages[3].any()
    if name == "gpg":
        # Its scale is the share of rows with a score, the leftover row among them: 6 / 5 instead of 5 / 4.
        without = without * (6 / 5) / (5 / 4)
    torch.testing.assert_close(advantages[kept], without, atol=1e-12, rtol=1e-12)
