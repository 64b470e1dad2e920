"""compute_advantage: which rows count, what they get, and what the batch holds afterwards."""

import math

import numpy as np
import pytest
import torch

from burnish.config import AlgoConfig
from burnish.conformance.batches import ragged_batch
from burnish.core_algos import estimators
from burnish.core_algos.advantages import compute_advantage
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError
from tests.core_algos.estimator_calls import GROUPED, NAMES, TOKEN_BASELINES, estimate


def batch_of(seed: int = 0, **extra: torch.Tensor) -> DataProto:
    """Everything that an estimator may name; four groups of three rows, interleaved."""
    b = ragged_batch(seed)
    tensors = {key: value for key, value in b.keyed().items() if isinstance(value, torch.Tensor)}
    return DataProto.from_dict(tensors=tensors | extra, non_tensors={"uid": b.uids})


def scored(scores: list[float], valid: list[bool], uids: list[str]) -> DataProto:
    rewards = torch.tensor([[0.0, score, 0.0] for score in scores])
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": torch.tensor([[True, True, False]]).repeat(len(scores), 1),
        "values": torch.zeros_like(rewards),
        "old_log_probs": torch.full_like(rewards, -1.0),
        "sum_pi_squared": torch.full_like(rewards, 0.5),
        "reward_baselines": torch.zeros(len(scores)),
        "reward_components": torch.tensor(scores).unsqueeze(-1),
        "valid": torch.tensor(valid),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})


@pytest.mark.parametrize("name", NAMES)
def test_adds_exactly_three_keys_and_leaves_the_others_alone(name):
    data = batch_of()
    before = {key: value.clone() for key, value in data.batch.items()}
    result = compute_advantage(data, name, gamma=0.9, lam=0.8, num_repeat=3, config=AlgoConfig())
    assert result is data
    assert set(data.batch.keys()) - set(before) == {"advantages", "returns", "loss_mask"}
    assert all(torch.equal(data.batch[key], value) for key, value in before.items())
    assert torch.equal(data.batch["loss_mask"], data.batch["response_mask"])
    assert data.batch["loss_mask"].dtype == torch.bool
    assert data.batch["loss_mask"].data_ptr() != data.batch["response_mask"].data_ptr()
    assert not data.batch["advantages"][~data.batch["response_mask"]].any()


@pytest.mark.parametrize("name", NAMES)
def test_abstained_rows_get_zeros_and_are_in_no_statistic(name):
    whole = batch_of(1)
    valid = torch.ones(len(whole), dtype=torch.bool)
    valid[[0, 4, 5]] = False
    # All of one group is gone: rows 3, 7 and 11 of group 3.
    valid[[3, 7, 11]] = False
    rewards = whole.batch["token_level_rewards"].clone()
    rewards[~valid] = math.nan
    data = batch_of(1, valid=valid, token_level_rewards=rewards)
    compute_advantage(data, name, gamma=0.9, lam=0.8, num_repeat=3)
    alone = compute_advantage(whole.select_idxs(valid), name, gamma=0.9, lam=0.8, num_repeat=3)
    for key in ("advantages", "returns", "loss_mask"):
        torch.testing.assert_close(data.batch[key][valid], alone.batch[key])
        assert not data.batch[key][~valid].any()


def test_none_rewards_leave_the_group_to_the_others():
    data = scored([1.0, math.nan, 0.0, 1.0], [True, False, True, True], ["a"] * 4)
    compute_advantage(data, "grpo", num_repeat=4, norm_adv_by_std_in_grpo=False)
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    assert data.batch["loss_mask"][:, 0].tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("valid", [[False] * 4, [True, False, False, False]])
def test_a_group_with_nothing_to_compare_is_finite_zero_or_a_return(name, valid):
    data = compute_advantage(scored([1.0] + [math.nan] * 3, valid, ["a"] * 4), name, num_repeat=4)
    assert data.batch["advantages"].isfinite().all()
    assert data.batch["returns"].isfinite().all()
    if name in GROUPED:
        assert not data.batch["advantages"].any()


@pytest.mark.parametrize("name", NAMES)
def test_rejection_by_row_leaves_every_statistic_and_rejection_by_token_only_the_loss(name):
    data = batch_of(2)
    response_mask = data.batch["response_mask"]
    rejected_row = response_mask.clone()
    rejected_row[1] = False
    kept = torch.arange(len(data)) != 1
    by_row = compute_advantage(batch_of(2, loss_mask=rejected_row), name, num_repeat=3)
    alone = compute_advantage(batch_of(2).select_idxs(kept), name, num_repeat=3)
    torch.testing.assert_close(by_row.batch["advantages"][kept], alone.batch["advantages"])
    assert not by_row.batch["advantages"][1].any()

    row = int((response_mask.sum(-1) > 1).nonzero()[0])
    token = int(response_mask[row].nonzero()[0])
    rejected_token = response_mask.clone()
    rejected_token[row, token] = False
    by_token = compute_advantage(batch_of(2, loss_mask=rejected_token), name, num_repeat=3)
    untouched = compute_advantage(batch_of(2), name, num_repeat=3)
    assert torch.equal(by_token.batch["advantages"], untouched.batch["advantages"])
    assert torch.equal(by_token.batch["loss_mask"], rejected_token)


def test_a_row_without_a_sampled_token_does_not_count():
    data = scored([1.0, 1.0, 0.0], [True] * 3, ["a"] * 3)
    data.batch["response_mask"] = torch.tensor([[False, False, False], [True, True, False], [True, True, False]])
    compute_advantage(data, "grpo", num_repeat=3, norm_adv_by_std_in_grpo=False)
    assert data.batch["advantages"][:, 0].tolist() == [0.0, 0.5, -0.5]


def test_single_sample_groups_are_an_explicit_choice():
    for allowed, expected in ((False, [0.0, 0.0]), (True, [1.0, 3.0])):
        data = scored([1.0, 3.0], [True, True], ["a", "b"])
        config = AlgoConfig(allow_single_sample_groups=allowed)
        compute_advantage(data, "rloo", num_repeat=1, config=config)
        assert data.batch["advantages"][:, 0].tolist() == expected


def test_settings_reach_the_estimator():
    default, dr_grpo = (
        compute_advantage(batch_of(), "grpo", num_repeat=3, norm_adv_by_std_in_grpo=norm).batch["advantages"]
        for norm in (True, False)
    )
    assert not torch.allclose(default, dr_grpo)
    one, other = (compute_advantage(batch_of(), "gae", gamma=0.9, lam=lam).batch["returns"] for lam in (1.0, 0.5))
    assert not torch.allclose(one, other)


def test_an_estimator_gets_what_it_names():
    seen = {}

    def mine(token_level_rewards, response_mask, index, custom_key, gamma, scale=2.0):
        seen.update(index=list(index), custom_key=custom_key, gamma=gamma, scale=scale)
        return token_level_rewards * scale, token_level_rewards

    def greedy(token_level_rewards, response_mask, **kwargs):
        seen.update(kwargs)
        return token_level_rewards, token_level_rewards

    estimators.register_adv_est("mine")(mine)
    estimators.register_adv_est("greedy")(greedy)
    try:
        data = batch_of(custom_key=torch.arange(12))
        compute_advantage(data, "mine", gamma=0.5)
        assert seen["index"] == list(data.non_tensor_batch["uid"])
        assert (seen["gamma"], seen["scale"]) == (0.5, 2.0)
        assert torch.equal(seen["custom_key"], torch.arange(12))
        torch.testing.assert_close(data.batch["advantages"], 2 * data.batch["token_level_rewards"])
        seen.clear()
        compute_advantage(batch_of(), "greedy", num_repeat=5)
        assert seen["num_repeat"] == 5
        assert len(seen["index"]) == 12
        with pytest.raises(TrainingError, match="mine needs 'custom_key'"):
            compute_advantage(batch_of(), "mine")
    finally:
        del estimators.ADV_ESTIMATORS._entries["mine"], estimators.ADV_ESTIMATORS._entries["greedy"]


@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_gets_what_it_names_from_the_batch(name):
    b = ragged_batch(3)
    config = AlgoConfig(gdpo_reward_weights=[1.0, -0.5])
    data = compute_advantage(batch_of(3), name, gamma=0.9, lam=0.8, num_repeat=3, config=config)
    settings = {"gamma": 0.9, "lam": 0.8, "num_repeat": 3, "gdpo_reward_weights": [1.0, -0.5]}
    for key, want in zip(("advantages", "returns"), estimate(name, b.keyed(), **settings), strict=True):
        assert torch.equal(data.batch[key], want)


@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_what_has_a_default_may_be_missing_from_the_batch(name):
    data = batch_of(3)
    weighted = compute_advantage(data.select(deepcopy=True), name, num_repeat=3).batch["advantages"]
    del data.batch["rollout_is_weights"]
    compute_advantage(data, name, num_repeat=3)
    entries = ragged_batch(3).keyed() | {"rollout_is_weights": None}
    assert torch.equal(data.batch["advantages"], estimate(name, entries)[0])
    assert not torch.allclose(data.batch["advantages"], weighted)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused_whatever_the_estimator(name):
    empty = torch.zeros_like(batch_of().batch["response_mask"])
    with pytest.raises(TrainingError, match="response_mask holds no 1 in 12 rows"):
        compute_advantage(batch_of(response_mask=empty), name)
    with pytest.raises(TrainingError, match="response_mask has shape"):
        compute_advantage(batch_of(response_mask=empty[:, 1:]), name)
    for rejected in ([], [0]):
        data = batch_of()
        rewards = data.batch["token_level_rewards"]
        rewards[1, data.batch["response_mask"][1]] = math.nan
        data.batch["valid"] = torch.tensor([row not in rejected for row in range(12)])
        with pytest.raises(TrainingError, match="token_level_rewards holds NaN or inf"):
            compute_advantage(data, name)
    if name in GROUPED:
        data = batch_of()
        data.non_tensor_batch["uid"] = np.arange(12) / 2
        with pytest.raises(TrainingError, match="index has shape"):
            compute_advantage(data, name)


def test_all_rows_rejected_is_no_error_but_all_zeros():
    data = compute_advantage(batch_of(valid=torch.zeros(12, dtype=torch.bool)), "grpo")
    assert not any(data.batch[key].any() for key in ("advantages", "returns", "loss_mask"))
    assert data.batch["advantages"].data_ptr() != data.batch["returns"].data_ptr()


def test_what_is_missing_or_misshapen_is_named():
    with pytest.raises(TrainingError, match=r"Advantages need 'token_level_rewards'.*it holds .*response_mask"):
        compute_advantage(batch_of().select(batch_keys=["response_mask"]), "grpo")
    with pytest.raises(ConfigError, match="there is no advantage estimator"):
        compute_advantage(batch_of(), "gea")
    without_values = batch_of().select(batch_keys=["token_level_rewards", "response_mask"])
    with pytest.raises(TrainingError, match="gae needs 'values'"):
        compute_advantage(without_values, "gae")
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        compute_advantage(batch_of(response_mask=ragged_batch(0).values), "grpo")

    estimators.register_adv_est("narrow")(lambda token_level_rewards: (token_level_rewards[:, :1],) * 2)
    try:
        with pytest.raises(
            TrainingError, match=r"narrow returned \(a Tensor of shape .*must return \(advantages, returns\)"
        ):
            compute_advantage(batch_of(), "narrow")
    finally:
        del estimators.ADV_ESTIMATORS._entries["narrow"]


def test_an_estimator_that_returns_no_number_is_refused():
    def broken(token_level_rewards):
        advantages = token_level_rewards.clone()
        advantages[5] = math.nan
        return advantages, token_level_rewards

    estimators.register_adv_est("broken")(broken)
    try:
        with pytest.raises(TrainingError, match="advantages holds NaN or inf .* row 5"):
            compute_advantage(batch_of(), "broken")
    finally:
        del estimators.ADV_ESTIMATORS._entries["broken"]
