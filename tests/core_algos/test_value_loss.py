"""The critic's loss."""

import math

import pytest
import torch

from burnish.conformance.batches import ragged_batch
from burnish.conformance.losses.term import reference_inputs
from burnish.conformance.references import LOSS_SETTINGS, losses
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.value_loss import compute_value_loss
from burnish.utils.errors import TrainingError


def test_by_hand():
    # Old value 0, clip 0.5, return 2: the unclipped 1.0 is nearer than the clipped 0.5, so the clip decides.
    predicted = torch.tensor([[1.0, 0.25]], requires_grad=True)
    loss, clipfrac = compute_value_loss(
        predicted, torch.tensor([[2.0, 2.0]]), torch.zeros(1, 2), torch.ones(1, 2), cliprange_value=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.5**2 + 1.75**2) / 2)
    assert clipfrac.item() == 0.5
    assert predicted.grad.tolist() == [[0.0, pytest.approx(-1.75 / 2)]]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_naive_loop(seed, mode):
    b = ragged_batch(seed)
    loss, _ = compute_value_loss(b.vpreds, b.returns, b.values, b.mask, 0.3, mode)
    settings = {"loss_agg_mode": mode, "loss_scale_factor": b.mask.shape[1], "cliprange_value": 0.3}
    expected = losses.value_loss(reference_inputs(b, weighted=False), {**LOSS_SETTINGS, **settings})
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient(where, rubbish):
    inputs = [torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])]
    inputs[where][0, 1] = rubbish
    predicted, returns, values = inputs
    predicted.requires_grad_()
    loss, clipfrac = compute_value_loss(predicted, returns, values, torch.tensor([[1, 0]]), 0.5)
    loss.backward()
    assert (loss.item(), clipfrac.item()) == (0.5, 0.0)
    assert predicted.grad.tolist() == [[-1.0, 0.0]]


def test_nan_of_the_critic_surfaces_and_a_constant_that_is_not_finite_is_refused_by_name():
    good, bad = torch.zeros(1, 2), torch.tensor([[0.0, math.nan]])
    assert compute_value_loss(bad, good, good, torch.ones(1, 2), 0.5)[0].isnan()
    with pytest.raises(TrainingError, match="returns holds NaN or inf in 1 of the 2"):
        compute_value_loss(good, bad, good, torch.ones(1, 2), 0.5)
    with pytest.raises(TrainingError, match="values holds NaN or inf in 1 of the 2"):
        compute_value_loss(good, good, bad, torch.ones(1, 2), 0.5)


def test_a_wrong_mask_or_shape_is_refused_by_name():
    good = torch.zeros(2, 3)
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        compute_value_loss(good, good, good, good - 1, 0.5)
    with pytest.raises(TrainingError, match="response_mask"):
        compute_value_loss(good, good, good, good, 0.5)
    # TypeError: the shape annotations, which are enforced in tests.
    with pytest.raises((TrainingError, TypeError), match="returns"):
        compute_value_loss(good, good[:, :1], good, good + 1, 0.5)


def test_the_gradient_is_that_of_finite_differences_and_goes_to_the_prediction_alone():
    b = ragged_batch(3)
    b.values.requires_grad_()
    predicted = b.log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: compute_value_loss(v, b.rewards, b.values, b.mask, 0.3)[0], predicted)
    compute_value_loss(predicted, b.rewards, b.values, b.mask, 0.3)[0].backward()
    assert b.values.grad is None


def test_the_clip_share_adds_up_over_micro_batches():
    b = ragged_batch(4)
    info = {"dp_size": 4, "batch_num_tokens": int(b.mask.sum()), "global_batch_size": len(b.mask)}
    _, whole = compute_value_loss(b.log_probs, b.rewards, b.values, b.mask, 0.3)
    parts = [
        compute_value_loss(*(x[rows] for x in (b.log_probs, b.rewards, b.values, b.mask)), 0.3, global_batch_info=info)
        for rows in (slice(0, 3), slice(3, 12))
    ]
    torch.testing.assert_close(sum(clipfrac for _, clipfrac in parts), whole)
