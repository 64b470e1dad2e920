"""Importance weights and rejection against hand-computed answers and naive loops, and what must not change them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from burnish.config import RolloutCorrectionConfig
from burnish.config.rejection import PRESETS, RULES
from burnish.conformance.batches import RaggedBatch, ragged_batch
from burnish.conformance.references import CORRECTION_SETTINGS, accepted, importance_weights
from burnish.core_algos import policy_difference
from burnish.core_algos.rollout_correction import (
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
)
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError

LOG2 = math.log(2.0)


def correct(log_ratios: list[list[float]], mask: list[list[int]] | None = None, **config):
    """The correction of a batch with these log r, on rollout log-probs of -1; metrics without their prefix."""
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    rollout = torch.full_like(log_ratio, -1.0)
    ones = torch.ones_like(log_ratio) if mask is None else torch.tensor(mask)
    return run(rollout + log_ratio, rollout, ones, **config)


def run(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, **config):
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, RolloutCorrectionConfig(**config)
    )
    assert all(name.startswith("rollout_corr/") and math.isfinite(value) for name, value in metrics.items())
    return weights, kept, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def keeps(log_ratios: list[list[float]], rollout_rs: str, threshold, mask=None) -> list[list[int]]:
    return correct(log_ratios, mask, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)[1].int().tolist()


# Weights.


def test_token_weights_are_truncated_ratios():
    weights, kept, metrics = correct([[LOG2, 0.0, -LOG2, 1.0]], [[1, 1, 1, 1]], rollout_is="token")
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.5, 2.0]], dtype=torch.float64))
    assert kept.all()
    assert metrics["rollout_is_mean"] == pytest.approx(5.5 / 4)
    assert metrics["rollout_is_std"] == pytest.approx(np.std([2.0, 1.0, 0.5, 2.0]))
    assert metrics["rollout_is_max"] == pytest.approx(math.e)
    assert metrics["rollout_is_min"] == pytest.approx(0.5)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(5.5**2 / (4 * (4 + 1 + 0.25 + 4)))


def test_a_sequence_weight_is_the_product_over_the_row_on_every_token_of_the_mask():
    log_ratios = [[LOG2, -2 * LOG2, 9.0], [LOG2, LOG2, LOG2]]
    weights, _, metrics = correct(log_ratios, [[1, 1, 0], [1, 1, 1]], rollout_is="sequence", rollout_is_threshold=3.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0.0], [3.0, 3.0, 3.0]], dtype=torch.float64))
    assert metrics["rollout_is_max"] == pytest.approx(8.0)
    assert metrics["rollout_is_min"] == pytest.approx(0.5)
    assert metrics["rollout_is_mean"] == pytest.approx(10 / 5)
    assert metrics["rollout_is_seq_mean"] == pytest.approx(3.5 / 2)
    assert metrics["rollout_is_seq_std"] == pytest.approx(1.25)
    assert (metrics["rollout_is_seq_max"], metrics["rollout_is_seq_min"]) == pytest.approx((3.0, 0.5))
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(3 / 5)
    assert metrics["rollout_is_ratio_fraction_low"] == 0.0


def test_normalised_weights_have_mean_one_over_the_tokens_that_are_left():
    weights, kept, metrics = correct(
        [[LOG2, 0.0, 3.0]],
        rollout_is="token",
        rollout_is_threshold=4.0,
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.1_2.5",
    )
    assert kept.tolist() == [[True, True, False]]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 4.0]], dtype=torch.float64) / 1.5)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    assert metrics["rollout_is_mean"] == pytest.approx(7 / 3)


def test_weights_outside_of_two_bounds_are_zero_and_stay_in_the_mask():
    weights, kept, metrics = correct([[LOG2, 0.0, -LOG2, 1.0]], rollout_is="token", rollout_is_threshold="0.6_2.5")
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    assert kept.all()
    assert metrics["rollout_is_mean"] == pytest.approx(3 / 4)
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 4)


def test_two_bounds_judge_the_product_of_a_row():
    weights, _, _ = correct([[LOG2, LOG2], [LOG2, -LOG2]], rollout_is="sequence", rollout_is_threshold="0.5_3")
    assert weights.tolist() == [[0.0, 0.0], [pytest.approx(1.0)] * 2]


def test_weights_that_are_all_zero_are_not_normalised():
    weights, _, metrics = correct(
        [[1.0, 1.0]], rollout_is="token", rollout_is_threshold="0.5_2", rollout_is_batch_normalize=True
    )
    assert weights.tolist() == [[0.0, 0.0]]
    assert metrics["rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1000.0, -1000.0])
def test_extreme_differences_give_finite_weights_and_metrics(rollout_is, difference):
    weights, _, metrics = correct([[difference, difference]], rollout_is=rollout_is, rollout_is_threshold=1e12)
    assert weights.tolist() == [[pytest.approx(math.exp(math.copysign(20.0, difference)))] * 2]
    assert metrics["rollout_is_max"] == metrics["rollout_is_min"] == weights[0, 0]


def test_weights_carry_no_gradient_and_are_at_least_fp32():
    old = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    weights, _, _ = run(old, torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1, 2), rollout_is="token")
    assert not weights.requires_grad
    assert weights.dtype == torch.float32


def test_without_rollout_is_there_are_no_weights():
    weights, _, metrics = correct([[1.0]])
    assert weights is None
    assert not any(name.startswith(("rollout_is", "rollout_rs")) for name in metrics)


def test_other_weights_are_told():
    with pytest.raises(ConfigError, match=r"rollout_correction\.rollout_is=geometric.*Known: token, sequence"):
        correct([[1.0]], rollout_is="geometric")


# Rejection.


def test_token_k1_bounds_the_ratio_of_each_token():
    log_ratios = [[math.log(x) for x in (0.49, 0.51, 1.0, 3.9, 4.1)]]
    assert keeps(log_ratios, "token_k1", "0.5_4.0") == [[0, 1, 1, 1, 0]]


def test_token_k2_bounds_half_the_square():
    assert keeps([[1.0, -1.0, 1.01, -1.01]], "token_k2", 0.5) == [[1, 1, 0, 0]]


def test_token_k3_is_not_symmetric():
    # k3(log 2) = 2 - 1 - log 2 = 0.3069; k3(-log 2) = 0.5 - 1 + log 2 = 0.1931.
    assert keeps([[LOG2, -LOG2]], "token_k3", 0.25) == [[0, 1]]
    assert keeps([[LOG2, -LOG2]], "token_k3", 0.31) == [[1, 1]]
    assert keeps([[LOG2, -LOG2]], "token_k3", 0.19) == [[0, 0]]


def test_seq_sum_k1_bounds_the_ratio_of_the_whole_row():
    log_ratios = [[1.0, -1.0, 0.1], [0.3, 0.3, 0.3], [-0.3, -0.3, -0.3]]
    assert keeps(log_ratios, "seq_sum_k1", "0.5_2.0") == [[1] * 3, [0] * 3, [0] * 3]
    assert keeps(log_ratios, "seq_sum_k1", "0.5_2.5") == [[1] * 3, [1] * 3, [0] * 3]


def test_seq_mean_k1_bounds_the_geometric_mean():
    log_ratios = [[0.002, 0.0005], [0.0015, 0.0], [-0.0015, 0.0], [-0.003, 0.0]]
    assert keeps(log_ratios, "seq_mean_k1", "0.999_1.001") == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_seq_max_k1_wants_every_token_within_the_bounds():
    # The second row's largest abs(log r) is within 0.5_4, its smallest ratio is not.
    log_ratios = [[1.3, -0.6], [1.3, -0.8], [1.5, 0.0]]
    assert keeps(log_ratios, "seq_max_k1", "0.5_4.0") == [[1, 1], [0, 0], [0, 0]]
    assert keeps(log_ratios, "seq_max_k1", 4.0) == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize(("estimator", "of_one"), [("k2", 0.5), ("k3", math.e - 2)])
def test_sums_means_and_maxima_of_k2_and_k3_do_not_cancel(estimator, of_one):
    log_ratios, mask = [[1.0, 1.0, 0.0, 0.0]], [[1, 1, 1, 0]]
    for level, statistic in (("seq_sum", 2 * of_one), ("seq_mean", 2 * of_one / 3), ("seq_max", of_one)):
        assert keeps(log_ratios, f"{level}_{estimator}", statistic + 1e-9, mask) == [[1, 1, 1, 0]]
        assert keeps(log_ratios, f"{level}_{estimator}", statistic - 1e-9, mask) == [[0, 0, 0, 0]]


def test_rules_are_combined_and_each_looks_at_the_whole_mask():
    log_ratios = [[3.0, 0.0, 0.0], [3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]
    _, kept, metrics = correct(log_ratios, rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold="0.5_2.0")
    assert kept.int().tolist() == [[0, 0, 0], [0, 0, 1], [1, 1, 1]]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(5 / 9)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_rs_token_k1_masked_fraction"] == pytest.approx(3 / 9)
    assert metrics["rollout_rs_token_k1_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_rs_seq_sum_k1_masked_fraction"] == pytest.approx(3 / 9)
    assert metrics["rollout_rs_seq_sum_k1_seq_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_rs_token_k1_mean"] == pytest.approx(-3 / 9)
    assert (metrics["rollout_rs_token_k1_max"], metrics["rollout_rs_token_k1_min"]) == pytest.approx((3, -3))
    assert metrics["rollout_rs_seq_sum_k1_mean"] == pytest.approx(-1.0)
    assert (metrics["rollout_rs_seq_sum_k1_max"], metrics["rollout_rs_seq_sum_k1_min"]) == pytest.approx((0, -3))


def test_fractions_count_only_rows_and_tokens_of_the_mask():
    _, kept, metrics = correct(
        [[9.0, 0.0], [9.0, 9.0], [0.0, 9.0]],
        [[1, 1], [0, 0], [1, 0]],
        rollout_rs="token_k2",
        rollout_rs_threshold=1.0,
    )
    assert kept.int().tolist() == [[0, 1], [0, 0], [1, 0]]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("rollout_rs", RULES)
def test_everything_rejected_leaves_an_empty_mask_and_fractions_of_one(rollout_rs):
    _, kept, metrics = correct(
        [[5.0, 5.0], [5.0, 5.0]],
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=1.0,
    )
    assert not kept.any()
    for name in ("rollout_rs", f"rollout_rs_{rollout_rs}"):
        assert metrics[f"{name}_masked_fraction"] == metrics[f"{name}_seq_masked_fraction"] == 1.0
    assert metrics["rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_an_empty_mask_has_finite_metrics(shape):
    zeros = torch.full(shape, math.nan)
    weights, kept, metrics = run(
        zeros, zeros, torch.zeros(shape, dtype=torch.bool), rollout_is="token", rollout_is_batch_normalize=True,
        rollout_rs=",".join(RULES), rollout_rs_threshold=2.0,
    )  # fmt: skip
    assert not kept.any()
    assert weights.tolist() == torch.zeros(shape).tolist()
    assert metrics["rollout_rs_masked_fraction"] == metrics["kl"] == metrics["rollout_is_eff_sample_size"] == 0.0


# Presets.


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_no_preset_weighs_or_rejects_anything(preset):
    b = ragged_batch(3)
    weights, kept, metrics = run(b.old_log_probs, b.old_log_probs.clone(), b.mask, **PRESETS[preset])
    assert torch.equal(kept, b.mask)
    assert weights is None or torch.equal(weights, b.mask.double())
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max"):
        assert metrics[name] == 0.0
    assert metrics["ppl_ratio"] == 1.0
    assert metrics.get("rollout_is_eff_sample_size", 1.0) == 1.0
    assert metrics.get("rollout_rs_masked_fraction", 0.0) == 0.0


def test_geo_preset_rejects_a_drift_per_token_that_a_sequence_preset_lets_pass():
    log_ratios = [[0.002] * 100]
    assert not correct(log_ratios, **PRESETS["decoupled_geo_rs"])[1].any()
    assert correct(log_ratios, **PRESETS["decoupled_seq_is_rs"])[1].all()
    assert correct(log_ratios, **PRESETS["decoupled_k3_rs"])[1].all()


# Against naive loops, and invariances.


def compared(seed: int, **keys) -> tuple[RaggedBatch, tuple]:
    """A batch, and what the naive loops are given of it."""
    b = ragged_batch(seed)
    lists = (tensor.tolist() for tensor in (b.log_probs, b.old_log_probs, b.mask))
    return b, (*lists, {**CORRECTION_SETTINGS, **keys})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", [0.1, 1.3, 2.0, "0.7_1.6"])
@pytest.mark.parametrize("rollout_rs", RULES)
def test_rejection_equals_the_naive_loop(rollout_rs, threshold, seed):
    if rollout_rs.endswith("k1"):
        # One number is the larger ratio of the two.
        threshold = 10.0 if threshold == 0.1 else threshold
    elif isinstance(threshold, str):
        threshold = 0.02
    b, given = compared(seed, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)
    _, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)
    expected = torch.tensor(accepted(*given))
    assert torch.equal(kept, expected)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - (expected.sum() / b.mask.sum()).item(), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_equal_the_naive_loop(rollout_is, normalize, seed):
    keys = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": 1.2,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": "token_k2",
        "rollout_rs_threshold": 0.1,
    }
    b, given = compared(seed, **keys)
    weights, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, **keys)
    expected = torch.tensor(importance_weights(*given), dtype=torch.float64)
    assert 0 < kept.sum() < b.mask.sum()
    torch.testing.assert_close(weights, torch.where(b.mask, expected, 0.0), rtol=1e-12, atol=0)
    if normalize:
        assert weights[kept].mean().item() == pytest.approx(1.0)
        return
    inside = expected[b.mask].numpy()
    assert metrics["rollout_is_mean"] == pytest.approx(inside.mean())
    assert metrics["rollout_is_std"] == pytest.approx(inside.std())
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(inside.sum() ** 2 / (len(inside) * (inside**2).sum()))


ALL = {
    "rollout_is": "sequence",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.5_2.0,0.15,0.6",
}


@pytest.mark.parametrize("elements", [1, 40])
def test_the_blocks_of_rows_that_are_looked_at_at_once_do_not_matter(monkeypatch, elements):
    b = ragged_batch(4, empty_rows=2)
    weights, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, **ALL)
    monkeypatch.setattr(policy_difference, "_ELEMENTS", elements)
    other_weights, other_kept, other_metrics = run(b.log_probs, b.old_log_probs, b.mask, **ALL)
    assert torch.equal(other_kept, kept)
    torch.testing.assert_close(other_weights, weights, rtol=1e-12, atol=0)
    assert other_metrics == pytest.approx(metrics, rel=1e-12)


def test_the_order_of_rows_does_not_matter():
    b = ragged_batch(5)
    weights, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, **ALL)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(0))
    c = b.map(lambda tensor: tensor[order])
    other_weights, other_kept, other_metrics = run(c.log_probs, c.old_log_probs, c.mask, **ALL)
    assert 0 < kept.sum() < b.mask.sum()
    assert torch.equal(other_kept, kept[order])
    torch.testing.assert_close(other_weights, weights[order], rtol=1e-12, atol=0)
    assert other_metrics == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("rubbish", [0.0, 50.0, math.nan, math.inf, -math.inf])
def test_padding_and_what_lies_outside_the_mask_does_not_matter(rubbish):
    b = ragged_batch(6)
    weights, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, **ALL)
    old, rollout = (torch.where(b.mask, x, rubbish) for x in (b.log_probs, b.old_log_probs))
    old, rollout = (torch.nn.functional.pad(x, (0, 3, 0, 2), value=rubbish) for x in (old, rollout))
    mask = torch.nn.functional.pad(b.mask, (0, 3, 0, 2))
    padded_weights, padded_kept, padded_metrics = run(old, rollout, mask, **ALL)
    assert torch.equal(padded_kept[:-2, :-3], kept)
    torch.testing.assert_close(padded_weights[:-2, :-3], weights, rtol=1e-12, atol=0)
    assert not padded_weights[~mask].any()
    assert not padded_kept[~mask].any()
    assert padded_metrics == pytest.approx(metrics, rel=1e-12)


def test_fp32_agrees_with_float64():
    b = ragged_batch(7)
    weights, kept, metrics = run(b.log_probs, b.old_log_probs, b.mask, **ALL)
    narrow = b.map(lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)
    narrow_weights, narrow_kept, narrow_metrics = run(narrow.log_probs, narrow.old_log_probs, narrow.mask, **ALL)
    assert torch.equal(narrow_kept, kept)
    torch.testing.assert_close(narrow_weights, weights.float(), rtol=1e-5, atol=0)
    assert narrow_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


# Bad input.


@pytest.mark.parametrize("name", ["old_log_prob", "rollout_log_prob"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_inside_the_mask_is_told_by_name(name, bad):
    tensors = {"old_log_prob": torch.zeros(2, 3), "rollout_log_prob": torch.zeros(2, 3)}
    tensors[name][1, 2] = bad
    with pytest.raises(TrainingError, match=rf"^{name} holds NaN or inf .* row 1, token 2"):
        run(*tensors.values(), torch.ones(2, 3), rollout_rs="token_k1", rollout_rs_threshold=2.0)


def test_a_wrong_mask_is_told():
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        run(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 0.5]]))


def test_a_missing_threshold_is_told():
    with pytest.raises(ConfigError, match="rollout_rs_threshold"):
        correct([[0.0]], rollout_rs="token_k1")


# The batch.


def batch(**tensors) -> DataProto:
    b = ragged_batch(8)
    held = {"old_log_probs": b.log_probs, "rollout_log_probs": b.old_log_probs, "response_mask": b.mask}
    return DataProto.from_dict(tensors={**held, **tensors})


def test_the_batch_gets_a_loss_mask_and_weights_and_keeps_its_response_mask():
    data = batch()
    response_mask = data.batch["response_mask"].clone()
    result, metrics = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**ALL))
    assert result is data
    assert torch.equal(data.batch["response_mask"], response_mask)
    weights, kept, expected = compute_rollout_correction_and_rejection_mask(
        data.batch["old_log_probs"], data.batch["rollout_log_probs"], response_mask, RolloutCorrectionConfig(**ALL)
    )
    assert torch.equal(data.batch["loss_mask"], kept)
    assert torch.equal(data.batch["rollout_is_weights"], weights)
    assert metrics == expected
    assert not torch.equal(kept, response_mask)


def test_without_correction_the_loss_mask_is_a_copy_and_there_are_no_weights():
    data = batch()
    _, metrics = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig())
    assert torch.equal(data.batch["loss_mask"], data.batch["response_mask"])
    assert data.batch["loss_mask"].data_ptr() != data.batch["response_mask"].data_ptr()
    assert "rollout_is_weights" not in data.batch
    assert metrics["rollout_corr/kl"] != 0.0


def test_rows_that_do_not_count_are_in_no_statistic():
    b = ragged_batch(8)
    valid = torch.tensor([True, False] * 6)
    loss_mask = b.mask & (torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7)
    data = batch(valid=valid, loss_mask=loss_mask)
    data.batch["rollout_log_probs"][1] = math.nan
    _, metrics = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**ALL))
    weights, kept, expected = compute_rollout_correction_and_rejection_mask(
        b.log_probs[valid], b.old_log_probs[valid], loss_mask[valid], RolloutCorrectionConfig(**ALL)
    )
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert torch.equal(data.batch["loss_mask"][valid], kept)
    torch.testing.assert_close(data.batch["rollout_is_weights"][valid], weights, rtol=1e-12, atol=0)
    assert not data.batch["loss_mask"][~valid].any()
    assert not data.batch["rollout_is_weights"][~valid].any()


@pytest.mark.parametrize(("key", "hint"), [("rollout_log_probs", "calculate_log_probs"), ("old_log_probs", "trainer")])
def test_missing_log_probs_are_told(key, hint):
    data = batch()
    del data.batch[key]
    with pytest.raises(TrainingError, match=f"no '{key}'.*{hint}"):
        compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig())


def test_any_object_with_the_keys_will_do_as_settings():
    settings = SimpleNamespace(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs=None,
        rollout_rs_threshold=None,
        rollout_is_batch_normalize=False,
    )
    zeros = torch.zeros(1, 1)
    weights, _, _ = compute_rollout_correction_and_rejection_mask(zeros, zeros, torch.ones(1, 1), settings)
    assert weights.tolist() == [[1.0]]
