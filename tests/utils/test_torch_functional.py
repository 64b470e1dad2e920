"""Masked statistics: definitions, what lies outside the mask, and what is refused."""

import math
import statistics

import pytest
import torch

from burnish.utils.errors import TrainingError
from burnish.utils.torch_functional import (
    as_mask,
    check_finite,
    check_shapes,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    zero_outside,
)

NAN = math.nan


def test_mean_and_variance_are_those_of_the_values_inside_the_mask():
    values = torch.tensor([[1.0, 2.0, NAN], [4.0, math.inf, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    inside = [1.0, 2.0, 4.0, 9.0]
    assert masked_sum(values, mask).item() == sum(inside)
    assert masked_mean(values, mask).item() == pytest.approx(statistics.mean(inside), abs=1e-7)
    assert masked_var(values, mask).item() == pytest.approx(statistics.variance(inside), rel=1e-7)
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(statistics.pvariance(inside), rel=1e-7)
    torch.testing.assert_close(masked_mean(values, mask, axis=-1), torch.tensor([1.5, 6.5]).double(), atol=1e-7, rtol=0)


def test_an_empty_mask_has_mean_zero_and_fewer_than_two_values_have_variance_zero():
    values = torch.tensor([[3.0, NAN]])
    for mask in (torch.tensor([[False, False]]), torch.tensor([[True, False]])):
        assert masked_var(values, mask).item() == 0.0
        assert torch.equal(masked_whiten(values, mask), torch.zeros(1, 2))
    assert masked_mean(values, torch.tensor([[False, False]])).item() == 0.0


def test_variance_survives_a_mean_much_larger_than_the_deviations():
    values = torch.tensor([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3])
    assert masked_var(values, torch.ones(4, dtype=torch.bool)).item() == pytest.approx(5 / 3, rel=1e-4)


@pytest.mark.parametrize("size", [1e18, 1e20, 1e30])
def test_whitening_does_not_depend_on_the_size_of_the_values(size):
    values = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    torch.testing.assert_close(masked_whiten(size * values, mask), masked_whiten(values, mask))


@pytest.mark.parametrize("constant", [0.1, 0.2, 0.7, 1 / 3, -123.456])
@pytest.mark.parametrize("count", [2, 3, 64, 1000])
def test_whitening_equal_values_gives_exactly_zero(constant, count):
    values = torch.full((count, 7), constant)
    assert torch.equal(masked_whiten(values, values > -1e9), torch.zeros(count, 7))


def test_whitened_values_have_mean_zero_and_variance_one_and_may_keep_their_mean():
    values = torch.randn(50, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    mask = torch.rand(50, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    whitened = masked_whiten(values, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-7)
    assert masked_var(whitened, mask).item() == pytest.approx(1, abs=1e-7)
    assert torch.equal(whitened[~mask], torch.zeros(int((~mask).sum())).double())
    kept = masked_whiten(values, mask, shift_mean=False)
    assert masked_mean(kept, mask).item() == pytest.approx(masked_mean(values, mask).item(), abs=1e-6)


def test_nan_inside_the_mask_surfaces():
    values = torch.tensor([1.0, NAN])
    assert masked_mean(values, torch.tensor([True, True])).isnan()
    assert masked_whiten(values, torch.tensor([True, True])).isnan().any()


def test_half_precision_is_accumulated_in_fp32():
    values = torch.full((5000,), 0.1, dtype=torch.bfloat16)
    mean = masked_mean(values, torch.ones(5000, dtype=torch.bool))
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(values[0].item(), rel=1e-5)


def test_zeroing_the_inputs_keeps_nan_out_of_the_gradient():
    log_prob = torch.zeros(2, requires_grad=True)
    mask = torch.tensor([True, False])
    new, old = zero_outside(mask, log_prob=log_prob, old=torch.tensor([0.0, NAN]))
    (new - old).exp().sum().backward()
    assert torch.equal(log_prob.grad, torch.tensor([1.0, 0.0]))


def test_a_mask_of_other_values_or_another_shape_is_refused_by_name():
    values = torch.zeros(2, 3)
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        as_mask(torch.tensor([[0.0, 1.0, -0.5], [0.0, 1.0, 1.0]]), values, "response_mask")
    with pytest.raises(TrainingError, match="response_mask has shape"):
        as_mask(torch.ones(2, 1), values, "response_mask")
    with pytest.raises(TrainingError, match="advantages has shape"):
        zero_outside(torch.ones(2, 3, dtype=torch.bool), advantages=torch.zeros(2, 1))
    with pytest.raises(TrainingError, match="values has shape"):
        check_shapes(values, values=torch.zeros(2, 1))


def test_what_is_not_finite_inside_the_mask_is_refused_by_name_number_and_place():
    values = torch.tensor([[NAN, 1.0, 2.0], [3.0, math.inf, -math.inf]])
    inside = torch.tensor([[False, True, True], [True, True, True]])
    with pytest.raises(TrainingError, match=r"returns holds NaN or inf in 2 of the 5 .* the first at row 1, token 1"):
        check_finite(inside, values=torch.zeros(2, 3), returns=values)
    with pytest.raises(TrainingError, match=r"scores holds NaN or inf in 1 of the 2 .* the first at row 1:"):
        check_finite(torch.tensor([True, True]), scores=torch.tensor([0.0, NAN]))


def test_what_is_not_finite_outside_the_mask_passes():
    values = torch.tensor([[NAN, 1.0], [math.inf, -math.inf]], requires_grad=True)
    check_finite(torch.tensor([[False, True], [False, False]]), values=values)
    check_finite(torch.zeros(2, 2, dtype=torch.bool), values=values)


def test_finite_values_pass_even_where_their_sum_overflows():
    inside = torch.ones(1, 2, dtype=torch.bool)
    check_finite(inside, half=torch.full((1, 2), 6e4, dtype=torch.float16), full=torch.full((1, 2), 3e38))
    check_finite(inside, numbers=torch.tensor([[1, 2]]), nothing=torch.tensor([[True, False]]))


def test_finiteness_is_not_looked_for_where_looking_would_wait_for_the_device():
    mask = torch.ones(1, 2, dtype=torch.bool, device="meta")
    check_finite(mask, values=torch.empty(1, 2, device="meta"))
    with pytest.raises(TrainingError, match="values has shape"):
        check_finite(mask, values=torch.empty(1, 3, device="meta"))
