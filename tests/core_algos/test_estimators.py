"""What holds for every advantage estimator: the naive loop's answer, invariances, the rules for groups, the registry."""

import math

import numpy as np
import pytest
import torch

from burnish.conformance.batches import advantage_batch, ragged_batch
from burnish.core_algos import scans
from burnish.core_algos.estimators import ADV_ESTIMATORS, get_adv_estimator_fn, register_adv_est
from burnish.utils.errors import ConfigError
from tests.core_algos.estimator_calls import GROUPED, NAMES, PER_TOKEN, WHITENED, estimate, reference, scored

every_estimator = pytest.mark.parametrize("name", NAMES)
VARIANTS = [
    {},
    {"norm_adv_by_std_in_grpo": False, "handle_zero_tail": False, "gdpo_reward_weights": [0.3, -2.0], "alpha": 2.0},
    {"allow_single_sample_groups": True, "num_repeat": 1, "gamma": 1.0, "lam": 0.5, "f_norm": 4.0},
]


def agree(got, want, tolerance: float = 1e-10) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("settings", VARIANTS, ids=["defaults", "other settings", "single rows"])
@pytest.mark.parametrize("seed", range(4))
@every_estimator
def test_equals_the_naive_loop(name, seed, settings):
    entries = advantage_batch(seed).keyed()
    agree(estimate(name, entries, **settings), reference(name, entries, **settings))


@pytest.mark.parametrize("num_threads", [1, 3])
@every_estimator
def test_large_batches_are_worked_on_in_blocks_and_by_threads(name, num_threads, monkeypatch):
    monkeypatch.setattr(scans, "_SCANNED_ROWS", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    entries = ragged_batch(3, (9, 1, 70), width=150, process_rewards=True).keyed()
    agree(estimate(name, entries), reference(name, entries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_estimator
def test_results_are_fp32_for_narrower_inputs(name, dtype):
    narrow = ragged_batch(0).to(dtype)
    for got, want in zip(estimate(name, narrow.keyed()), estimate(name, narrow.to(torch.float64).keyed()), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@every_estimator
def test_padding_changes_nothing(name):
    b = advantage_batch(1)
    width = b.mask.shape[1]
    padded = estimate(name, b.pad(5, 0.0).keyed())
    agree([tensor[:, :width] for tensor in padded], estimate(name, b.keyed()))
    assert not any(tensor[:, width:].any() for tensor in padded)


@every_estimator
def test_row_order_and_group_interleaving_change_nothing(name):
    b = advantage_batch(2)
    want = estimate(name, b.keyed())
    for order in (np.random.default_rng(0).permutation(len(b.mask)), np.argsort(b.uids, kind="stable")):
        agree(estimate(name, b.take(order).keyed()), [tensor[torch.from_numpy(order)] for tensor in want])


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@every_estimator
def test_what_lies_outside_the_mask_is_harmless(name, rubbish):
    b = advantage_batch(4)
    filled = b.fill_outside(rubbish).keyed()
    if math.isfinite(rubbish):
        # A score is the sum of its row: a reward counts wherever it lies.
        filled["token_level_rewards"] = b.rewards
    agree(estimate(name, filled), estimate(name, b.keyed()), 1e-12)


@pytest.mark.parametrize("name", [name for name in PER_TOKEN if name != "optimal_token_baseline"])
def test_tool_tokens_are_as_if_they_were_not_there(name):
    b = ragged_batch(5, (2,), width=5)
    gaps = torch.tensor([[True, True, False, False, True], [True, False, True, True, False]])
    rewards = torch.tensor([[0.5, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.25, 0.5, 0.0]]).double()
    tokens = torch.tensor([[0, 1, 4], [0, 2, 3]])
    entries = b.keyed() | {"response_mask": gaps, "token_level_rewards": rewards}
    without = {key: x.gather(1, tokens) if getattr(x, "shape", None) == gaps.shape else x for key, x in entries.items()}
    agree([tensor.gather(1, tokens) for tensor in estimate(name, entries)], estimate(name, without))


@every_estimator
def test_inputs_are_left_as_they_are(name):
    for width in (1, 70):
        entries = ragged_batch(6, (3, 2), width=width).keyed()
        before = {key: value.clone() for key, value in entries.items() if isinstance(value, torch.Tensor)}
        estimate(name, entries)
        assert all(torch.equal(entries[key], value) for key, value in before.items())


@every_estimator
def test_advantages_and_returns_are_separate_tensors_without_gradient(name):
    entries = advantage_batch(0).keyed()
    for tensor in entries.values():
        if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.bool:
            tensor.requires_grad_()
    advantages, returns = estimate(name, entries)
    assert advantages.data_ptr() != returns.data_ptr()
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_and_deviation_one(name):
    b = ragged_batch(7, (4, 3, 5))
    tokens = estimate(name, b.keyed())[0][b.mask]
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert tokens.std().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 5, 7, 64])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.7, 1 / 3])
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_equal_rewards_gets_exactly_zero(name, reward, size, dtype):
    entries = scored([reward] * size + [0.0, 1.0], ["same"] * size + ["mixed"] * 2, dtype)
    advantages, _ = estimate(name, entries)
    assert torch.equal(advantages[:size], torch.zeros(size, 2, dtype=dtype))
    assert advantages[size:].any()


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_constant_groups_are_not_in_the_whitening(name):
    mixed = scored([0.0, 1.0, 0.25], ["a"] * 3, torch.float64)
    with_constant = scored([0.0, 1.0, 0.25] + [0.7] * 20, ["a"] * 3 + ["b"] * 20, torch.float64)
    agree([estimate(name, with_constant)[0][:3]], [estimate(name, mixed)[0]], 1e-12)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_nothing_but_equal_returns_whitens_to_exactly_zero(name):
    entries = scored([0.2] * 33, [str(row) for row in range(33)])
    assert not estimate(name, entries, gamma=1.0, allow_single_sample_groups=True, num_repeat=1)[0].any()


@pytest.mark.parametrize("name", GROUPED)
def test_rows_alone_in_their_group_follow_one_rule(name):
    scores = [2.2, -0.3, -2.8, 0.9]
    entries = scored(scores, ["a", "b", "c", "d"])
    assert not estimate(name, entries)[0].any()
    assert not estimate(name, entries, num_repeat=1)[0].any()
    # What is left over of a larger group is not a single-sample run.
    assert not estimate(name, entries, allow_single_sample_groups=True, num_repeat=4)[0].any()
    kept = estimate(name, entries, allow_single_sample_groups=True, num_repeat=1)[0][:, 0]
    if name == "grpo_passk":
        assert not kept.any()
        return
    if name in WHITENED:
        # The mean is 0 already; the deviation is that of the tokens, two of each row.
        deviation = torch.tensor(scores * 2).std().item()
        scores = [score / deviation for score in scores]
    assert kept.tolist() == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("name", GROUPED)
def test_ragged_groups_are_each_their_own(name):
    entries = scored([5.0, 1.0, 0.0, 1.0, 3.0, 2.0], ["b", "a", "a", "a", "c", "c"], torch.float64)
    pair = scored([3.0, 2.0], ["c", "c"], torch.float64)
    advantages, alone = estimate(name, entries)[0], estimate(name, pair)[0]
    assert not advantages[0].any()
    # Up to what whitening does to the whole batch, and gpg's share of scored rows (5 of 6, and 2 of 2).
    scale = advantages[4, 0] / alone[0, 0] if name in WHITENED else 6 / 5 if name == "gpg" else 1.0
    agree([advantages[4:]], [alone * scale], 1e-9)


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
    entries = scored([1, 0, 0, 1]) | {"index": index}
    assert estimate("grpo", entries, norm_adv_by_std_in_grpo=False)[0][:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_vectorized_names_are_the_same_functions():
    assert ADV_ESTIMATORS.get("grpo_vectorized") is ADV_ESTIMATORS.get("grpo")
    assert ADV_ESTIMATORS.get("rloo_vectorized") is ADV_ESTIMATORS.get("rloo")


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
