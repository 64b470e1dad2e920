"""How far two policies are apart: hand-computed answers, the naive loop, and what must not change the metrics."""

import math

import numpy as np
import pytest
import torch

from burnish.conformance.batches import ragged_batch
from burnish.core_algos import policy_difference
from burnish.core_algos.policy_difference import (
    compute_offpolicy_metrics,
    k_statistic,
    map_rows,
    rollout_log_ratio,
)
from burnish.utils.errors import TrainingError

LOG2 = math.log(2.0)


def difference(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The metrics without their prefix."""
    metrics = compute_offpolicy_metrics(old, rollout, mask)
    assert all(name.startswith("rollout_corr/") and math.isfinite(value) for name, value in metrics.items())
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def test_the_three_statistics_of_a_log_ratio():
    log_ratio = torch.tensor([LOG2, 0.0, -LOG2], dtype=torch.float64)
    for name, expected in (
        ("k1", [-LOG2, 0.0, LOG2]),
        ("k2", [LOG2**2 / 2, 0.0, LOG2**2 / 2]),
        ("k3", [1 - LOG2, 0.0, LOG2 - 0.5]),
    ):
        assert k_statistic(log_ratio, name).tolist() == pytest.approx(expected)


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    assert k_statistic(torch.tensor(1e-7, dtype=torch.float64), "k3").item() == pytest.approx(0.5e-14, rel=1e-6)


def test_a_log_ratio_is_bounded_zero_outside_the_mask_and_without_gradient():
    old = torch.tensor([[-1.0, -1.0, -900.0, -math.inf]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -900.0, -1.0, math.nan]])
    log_ratio = rollout_log_ratio(old, rollout, torch.tensor([[True, True, True, False]]))
    assert log_ratio.tolist() == [[0.5, 20.0, -20.0, 0.0]]
    assert log_ratio.dtype == torch.float64
    assert not log_ratio.requires_grad


def test_by_hand():
    # Rows of log r = (log 2, 0) and (-log 2), on a rollout of probability 1/4 everywhere.
    rollout = torch.full((2, 2), -2 * LOG2, dtype=torch.float64)
    old = rollout + torch.tensor([[LOG2, 0.0], [-LOG2, 7.0]])
    assert difference(old, rollout, torch.tensor([[1, 1], [1, 0]])) == pytest.approx(
        {
            "kl": 0.0,
            "k3_kl": ((1 - LOG2) + (LOG2 - 0.5)) / 3,
            "chi2_token": (4 + 1 + 0.25) / 3 - 1,
            "chi2_seq": (4 + 0.25) / 2 - 1,
            "training_ppl": (math.sqrt(8) + 8) / 2,
            "rollout_ppl": 4.0,
            "training_log_ppl": (1.5 * LOG2 + 3 * LOG2) / 2,
            "rollout_log_ppl": 2 * LOG2,
            "log_ppl_diff": LOG2 / 4,
            "log_ppl_abs_diff": 0.75 * LOG2,
            "log_ppl_diff_max": LOG2,
            "log_ppl_diff_min": -LOG2 / 2,
            "ppl_ratio": (1 / math.sqrt(2) + 2) / 2,
        }
    )


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_the_naive_loop(seed):
    b = ragged_batch(seed, empty_rows=1)
    rows = []
    for old, rollout, m in zip(b.log_probs.tolist(), b.old_log_probs.tolist(), b.mask.tolist(), strict=True):
        rows.append([(o, r) for o, r, inside in zip(old, rollout, m, strict=True) if inside])
    rows = [row for row in rows if row]
    log_ratios = [[o - r for o, r in row] for row in rows]
    tokens = [x for row in log_ratios for x in row]
    ours = [-np.mean([o for o, _ in row]) for row in rows]
    theirs = [-np.mean([r for _, r in row]) for row in rows]
    apart = np.subtract(ours, theirs)
    assert difference(b.log_probs, b.old_log_probs, b.mask) == pytest.approx(
        {
            "kl": -np.mean(tokens),
            "k3_kl": np.mean([math.exp(x) - 1 - x for x in tokens]),
            "chi2_token": np.mean([math.exp(2 * x) for x in tokens]) - 1,
            "chi2_seq": np.mean([math.exp(2 * sum(row)) for row in log_ratios]) - 1,
            "training_ppl": np.mean(np.exp(ours)),
            "rollout_ppl": np.mean(np.exp(theirs)),
            "training_log_ppl": np.mean(ours),
            "rollout_log_ppl": np.mean(theirs),
            "log_ppl_diff": np.mean(apart),
            "log_ppl_abs_diff": np.mean(np.abs(apart)),
            "log_ppl_diff_max": max(apart),
            "log_ppl_diff_min": min(apart),
            "ppl_ratio": np.mean(np.exp(apart)),
        },
        rel=1e-10,
    )


@pytest.mark.parametrize("elements", [1, 9, 40])
def test_the_blocks_of_rows_that_are_looked_at_at_once_do_not_matter(monkeypatch, elements):
    b = ragged_batch(4, empty_rows=2)
    whole = difference(b.log_probs, b.old_log_probs, b.mask)
    monkeypatch.setattr(policy_difference, "_ELEMENTS", elements)
    blocks = map_rows(lambda rows: range(len(b.mask))[rows], b.mask)
    assert len(blocks) > 1
    assert [row for block in blocks for row in block] == list(range(len(b.mask)))
    assert difference(b.log_probs, b.old_log_probs, b.mask) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("rubbish", [0.0, math.nan, math.inf, -math.inf])
def test_padding_and_what_lies_outside_the_mask_do_not_matter(rubbish):
    b = ragged_batch(5)
    wide = b.fill_outside(rubbish).pad(2, value=rubbish)
    assert difference(wide.log_probs, wide.old_log_probs, wide.mask) == pytest.approx(
        difference(b.log_probs, b.old_log_probs, b.mask), rel=1e-12
    )


def test_policies_that_agree_are_not_apart():
    b = ragged_batch(6)
    metrics = difference(b.log_probs, b.log_probs.clone(), b.mask)
    assert metrics["ppl_ratio"] == 1.0
    assert metrics["training_ppl"] == pytest.approx(metrics["rollout_ppl"])
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max"):
        assert metrics[name] == 0.0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_an_empty_mask_counts_as_one_token_on_which_they_agree(shape):
    nothing = torch.full(shape, math.nan)
    metrics = difference(nothing, nothing, torch.zeros(shape))
    ones = {"training_ppl", "rollout_ppl", "ppl_ratio"}
    assert metrics == {name: float(name in ones) for name in metrics}


@pytest.mark.parametrize("distance", [100.0, -100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_apart_policies_have_finite_metrics(distance, dtype):
    near, far = torch.full((2, 50), -1.0, dtype=dtype), torch.full((2, 50), -1.0 - abs(distance), dtype=dtype)
    old, rollout = (near, far) if distance > 0 else (far, near)
    metrics = difference(old, rollout, torch.ones(2, 50))
    assert metrics["kl"] == -math.copysign(20.0, distance)


def test_bad_input_is_told_by_name():
    good, bad = torch.zeros(1, 2), torch.tensor([[0.0, math.nan]])
    with pytest.raises(TrainingError, match="^old_log_prob holds NaN or inf"):
        compute_offpolicy_metrics(bad, good, torch.ones(1, 2))
    with pytest.raises(TrainingError, match="^rollout_log_prob holds NaN or inf"):
        compute_offpolicy_metrics(good, bad, torch.ones(1, 2))
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        compute_offpolicy_metrics(good, good, good + 0.5)
