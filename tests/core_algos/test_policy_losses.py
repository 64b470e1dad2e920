"""Policy losses against hand-computed answers, the naive loop, extremes, and what a mask must keep out."""

import math

import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.policy_losses import (
    POLICY_LOSSES,
    compute_policy_loss,
    compute_policy_loss_clip,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from burnish.utils.errors import ConfigError, TrainingError
from tests.core_algos import oracles
from tests.core_algos.oracles import ragged_batch


def one_token(old: float, new: float, advantage: float, **config):
    new_log_prob = torch.tensor([[new]], requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        torch.tensor([[old]]),
        new_log_prob,
        torch.tensor([[advantage]]),
        torch.ones(1, 1),
        "token-mean",
        FSDPActorConfig(**config),
    )
    loss.backward()
    return loss.item(), new_log_prob.grad.item(), {name: value.item() for name, value in metrics.items()}


def test_clip_worked_example():
    assert math.exp(0.5) == pytest.approx(1.6487, abs=1e-4)
    loss, gradient, metrics = one_token(-2.0, -1.5, 0.5, clip_ratio=0.2)
    assert loss == pytest.approx(-0.6)
    assert gradient == 0.0
    assert metrics == pytest.approx({"actor/pg_clipfrac": 1, "actor/ppo_kl": -0.5, "actor/pg_clipfrac_lower": 0})


def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    loss, gradient, metrics = one_token(-1.3, -1.3, 0.7)
    assert (loss, gradient) == pytest.approx((-0.7, -0.7))
    assert metrics == {"actor/pg_clipfrac": 0, "actor/ppo_kl": 0, "actor/pg_clipfrac_lower": 0}


def test_a_negative_advantage_is_bounded_by_the_second_clip():
    loss, gradient, metrics = one_token(-4.0, -1.0, -0.5, clip_ratio_c=3.0)
    assert loss == pytest.approx(1.5)
    assert gradient == 0.0
    assert metrics["actor/pg_clipfrac_lower"] == 1
    assert one_token(-4.0, -1.0, -0.5, clip_ratio_c=30.0)[0] == pytest.approx(0.5 * math.exp(3.0), rel=1e-5)


def test_low_and_high_are_offsets_and_follow_clip_ratio_where_they_are_null():
    assert one_token(-2.0, -1.5, 1.0, clip_ratio=0.1)[0] == pytest.approx(-1.1)
    assert one_token(-2.0, -1.5, 1.0, clip_ratio=0.1, clip_ratio_high=0.28)[0] == pytest.approx(-1.28)
    assert one_token(-1.5, -2.0, -1.0, clip_ratio=0.1)[0] == pytest.approx(0.9)
    assert one_token(-1.5, -2.0, -1.0, clip_ratio=0.1, clip_ratio_low=0.3)[0] == pytest.approx(0.7)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_naive_loop(seed, mode):
    b = ragged_batch(seed)
    config = FSDPActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.3)
    weights = b.values.exp()
    loss, metrics = compute_policy_loss_vanilla(
        b.old_log_probs, b.log_probs, b.advantages, b.mask, mode, config, rollout_is_weights=weights
    )
    old, new, advantages = (x.tolist() for x in (b.old_log_probs, b.log_probs, b.advantages))
    per_token = torch.tensor(oracles.vanilla(old, new, advantages, 0.2, 0.28, 1.3), dtype=torch.float64) * weights
    expected = oracles.aggregate(per_token.tolist(), b.mask.tolist(), mode, scale=b.mask.shape[1])
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["actor/ppo_kl"].item() == pytest.approx((b.old_log_probs - b.log_probs)[b.mask].mean().item())
    assert all(not metric.requires_grad and metric.dim() == 0 for metric in metrics.values())


def test_the_gradient_is_that_of_finite_differences():
    b = ragged_batch(11)
    config = FSDPActorConfig(clip_ratio=0.25)

    def loss(log_prob: torch.Tensor) -> torch.Tensor:
        return compute_policy_loss_vanilla(b.old_log_probs, log_prob, b.advantages, b.mask, "token-mean", config)[0]

    assert torch.autograd.gradcheck(loss, b.log_probs.clone().requires_grad_())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1000.0, -1000.0])
def test_an_extreme_ratio_gives_a_finite_loss_and_gradient(name, advantage, difference):
    log_prob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - difference, -1.0]])
    loss, metrics = get_policy_loss_fn(name)(
        old, log_prob, torch.full((1, 2), advantage), torch.ones(1, 2), "token-mean", FSDPActorConfig()
    )
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient(name, rubbish):
    mask = torch.tensor([[1, 0]])
    config = FSDPActorConfig()
    for where in range(4):
        inputs = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2)]
        inputs[where][0, 1] = rubbish
        old, new, advantages, weights = inputs
        new.requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(old, new, advantages, mask, "token-mean", config, weights)
        loss.backward()
        assert loss.item() == -1.0
        assert new.grad.tolist() == [[-1.0, 0.0]]
        assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_nan_inside_the_mask_surfaces(name):
    old = torch.tensor([[0.0, math.nan]])
    args = (old, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), "token-mean", FSDPActorConfig())
    assert get_policy_loss_fn(name)(*args)[0].isnan()


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_metrics_add_up_over_micro_batches_and_ranks(name):
    b = ragged_batch(12)
    loss_fn = get_policy_loss_fn(name)
    # Not the width of the mask: a denominator taken from a micro-batch would show.
    info = {"dp_size": 2, "batch_num_tokens": int(b.mask.sum()), "global_batch_size": len(b.mask)}

    def run(rows: slice, **config):
        return loss_fn(
            b.old_log_probs[rows], b.log_probs[rows], b.advantages[rows], b.mask[rows], "token-mean",
            FSDPActorConfig(**config),
        )  # fmt: skip

    loss, metrics = run(slice(None))
    parts = [run(rows, global_batch_info=info) for rows in (slice(0, 1), slice(1, 7), slice(7, 12))]
    torch.testing.assert_close(sum(part for part, _ in parts) / 2, loss)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(part[key] for _, part in parts), value)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_only_the_policy_gets_a_gradient(name):
    tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    old, new, advantages, weights = tensors
    loss, _ = get_policy_loss_fn(name)(old, new, advantages, torch.ones(2, 3), "token-mean", FSDPActorConfig(), weights)
    loss.backward()
    assert new.grad is not None
    assert old.grad is advantages.grad is weights.grad is None


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_a_wrong_mask_or_shape_is_refused(name):
    b = ragged_batch(0)
    config = FSDPActorConfig()
    with pytest.raises(TrainingError, match="response_mask"):
        get_policy_loss_fn(name)(b.old_log_probs, b.log_probs, b.advantages, b.advantages, "token-mean", config)
    with pytest.raises((TrainingError, TypeError), match="advantages"):
        get_policy_loss_fn(name)(b.old_log_probs, b.log_probs, b.advantages[:, :1], b.mask, "token-mean", config)


def test_a_loss_needs_its_config_and_a_second_clip_above_one():
    args = (torch.zeros(1, 1),) * 3 + (torch.ones(1, 1),)
    with pytest.raises(ConfigError, match="needs config"):
        compute_policy_loss_vanilla(*args)
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1\.0 must be above 1"):
        compute_policy_loss_vanilla(*args, config=FSDPActorConfig(clip_ratio_c=1.0))


def test_names():
    assert compute_policy_loss is compute_policy_loss_clip is compute_policy_loss_vanilla
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    with pytest.raises(ConfigError, match=r"policy_loss\.loss_mode=vanila.*Did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_registered_loss_is_found_by_its_name():
    @register_policy_loss("of_this_test")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return log_prob.sum(), {}

    try:
        assert get_policy_loss_fn("of_this_test") is mine
    finally:
        del POLICY_LOSSES._entries["of_this_test"]
