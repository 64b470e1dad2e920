"""Loss denominators: the five modes, and that a step may be cut in any way."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from burnish.conformance.batches import RaggedBatch, ragged_batch
from burnish.conformance.references import aggregate
from burnish.core_algos.aggregation import LOSS_AGG_MODES, agg_loss, token_mean
from burnish.core_algos.kl import kl_penalty
from burnish.core_algos.policy_losses import compute_policy_loss_vanilla
from burnish.core_algos.value_loss import compute_value_loss
from burnish.utils.errors import ConfigError, TrainingError

SCALE = 16.0


def info_of(mask: torch.Tensor, dp_size: int = 1) -> dict:
    return {
        "dp_size": dp_size,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(-1).sum()),
        "loss_scale_factor": SCALE,
    }


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-sum", (3 + 7) / 2),
        ("seq-mean-token-mean", (3 / 2 + 7 / 2) / 2),
        ("seq-mean-token-sum-norm", (3 + 7) / (2 * 10)),
        ("token-sum", 10),
    ],
)
def test_by_hand(mode, expected):
    loss = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, 4.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert agg_loss(loss, mask, mode, loss_scale_factor=10).item() == pytest.approx(expected)
    assert agg_loss(loss, mask, mode, dp_size=3, loss_scale_factor=10).item() == pytest.approx(3 * expected)
    # A micro-batch of a step of 40 tokens in 8 rows.
    scaled = {"token-mean": 10 / 40, "token-sum": 10}.get(mode, expected * 2 / 8)
    counts = {"batch_num_tokens": 40, "global_batch_size": torch.tensor(8)}
    assert agg_loss(loss, mask, mode, **counts, loss_scale_factor=10).item() == pytest.approx(scaled)


def test_without_a_scale_the_width_of_the_mask_is_taken():
    loss = torch.ones(2, 4)
    assert agg_loss(loss, torch.ones(2, 4), "seq-mean-token-sum-norm").item() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_equals_the_naive_loop(mode, seed):
    b = ragged_batch(seed)
    got = agg_loss(b.values, b.mask, mode, loss_scale_factor=SCALE).item()
    assert got == pytest.approx(aggregate(b.values.tolist(), b.mask.tolist(), mode, SCALE), rel=1e-12)


def total_loss(log_prob: torch.Tensor, b: RaggedBatch, mode: str, info: dict) -> torch.Tensor:
    """Policy, KL, entropy and value terms on one parameter."""
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=3.0, global_batch_info=info
    )
    policy, _ = compute_policy_loss_vanilla(b.old_log_probs, log_prob, b.advantages, b.mask, mode, config)
    kl = agg_loss(kl_penalty(log_prob, b.ref_log_probs, "k3+", b.mask), b.mask, mode, **info)
    entropy = agg_loss(-log_prob * log_prob.exp(), b.mask, mode, **info)
    value, _ = compute_value_loss(log_prob * 2, b.rewards, b.values, b.mask, 0.5, mode, info)
    return policy + 0.1 * kl - 0.01 * entropy + 0.5 * value


def loss_and_gradient(b: RaggedBatch, splits: list[list[int]], mode: str, dp_size: int = 1):
    """Sum over the splits of loss and gradient, averaged over the ranks as data parallelism does."""
    log_prob = b.log_probs.clone().requires_grad_()
    info = info_of(b.mask, dp_size)
    loss = torch.zeros((), dtype=log_prob.dtype)
    for rows in splits:
        part = total_loss(log_prob[rows], b.take(rows), mode, info) / dp_size
        part.backward()
        loss += part.detach()
    return loss, log_prob.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_and_gradient_do_not_depend_on_how_the_step_is_cut(mode, dtype, tolerance):
    b = ragged_batch(7).to(dtype)
    b.mask[2] = False
    num_rows = len(b.mask)
    loss, gradient = loss_and_gradient(b, [list(range(num_rows))], mode)
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).tolist()
    cuts = {
        "row by row": [[row] for row in range(num_rows)],
        "uneven": [list(range(5)), [5], list(range(6, num_rows))],
        "permuted": [shuffled[:4], shuffled[4:]],
        "two ranks": [list(range(6)), list(range(6, num_rows))],
    }
    for name, cut in cuts.items():
        other_loss, other_gradient = loss_and_gradient(b, cut, mode, dp_size=2 if name == "two ranks" else 1)
        assert (other_loss - loss).abs() <= tolerance * loss.abs().clamp(min=1), name
        assert (other_gradient - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 1, 1, 1], [3, 1]])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_responses_of_very_different_length_weigh_the_same_in_any_split(mode, split):
    b = ragged_batch(8, (1, 1, 1, 1), width=10)
    b = replace(b, mask=torch.arange(10)[None, :] < torch.tensor([1, 2, 3, 10])[:, None])
    starts = [sum(split[:i]) for i in range(len(split))]
    cut = [list(range(start, start + size)) for start, size in zip(starts, split, strict=True)]
    loss, gradient = loss_and_gradient(b, cut, mode)
    whole_loss, whole_gradient = loss_and_gradient(b, [[0, 1, 2, 3]], mode)
    torch.testing.assert_close(loss, whole_loss, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_padding_changes_nothing(mode):
    b = ragged_batch(9)
    wide = b.pad(4, value=math.nan)
    info = info_of(b.mask)
    got, want = (agg_loss(x.values, x.mask, mode, **info) for x in (wide, b))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_a_metric_is_a_share_that_adds_up_and_has_no_rank_factor():
    b = ragged_batch(10)
    whole = token_mean(b.values, b.mask)
    tokens = int(b.mask.sum())
    parts = [token_mean(b.values[rows], b.mask[rows], tokens) for rows in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(sum(parts), whole)
    assert token_mean(b.values > 0, b.mask).item() == pytest.approx((b.values > 0)[b.mask].double().mean().item())
    assert token_mean(b.values, torch.zeros_like(b.mask)).item() == 0.0


def test_a_micro_batch_of_padding_has_loss_and_gradient_zero():
    loss = torch.tensor([[math.nan, 1.0]], requires_grad=True)
    for mode in LOSS_AGG_MODES:
        info = {"batch_num_tokens": 7, "global_batch_size": 3, "loss_scale_factor": 5}
        result = agg_loss(loss, torch.zeros(1, 2, dtype=torch.bool), mode, **info)
        result.backward()
        assert result.item() == 0.0
        assert torch.equal(loss.grad, torch.zeros(1, 2))


def test_bad_input_is_refused():
    loss = torch.ones(2, 3)
    with pytest.raises(ConfigError, match=r"loss_agg_mode=token_mean.*token-mean, seq-mean-token-sum"):
        agg_loss(loss, torch.ones(2, 3), "token_mean")
    for mode in set(LOSS_AGG_MODES) - {"token-sum"}:
        with pytest.raises(TrainingError, match="loss_mask is empty"):
            agg_loss(loss, torch.zeros(2, 3), mode)
    with pytest.raises(TrainingError, match="loss_mask holds values other than 0 and 1"):
        agg_loss(loss, loss * 0.5, "token-mean")


def test_nan_inside_the_mask_surfaces():
    loss = torch.tensor([[math.nan, 1.0]])
    assert agg_loss(loss, torch.ones(1, 2), "token-mean").isnan()
