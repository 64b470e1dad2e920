import pytest
import torch
from torch import Tensor

from burnish.model.kernels.norm import rms_norm_backward_torch, rms_norm_torch
from tests.rollout.kernels.cases import TOLERANCE, normal, on_every_backend


def naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("again", [False, True])
def test_its_gradients_are_those_of_the_formula(again):
    x, residual = (normal(5, 12, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(2))
    weight = normal(12, dtype=torch.float64, seed=2).requires_grad_()
    grad_out, grad_sum = (normal(5, 12, dtype=torch.float64, seed=seed) for seed in (3, 4))
    h = x + residual
    expected = naive(h, weight, 1e-5)
    ((expected * grad_out).sum() + (h * grad_sum).sum()).backward()

    out, summed, rstd = rms_norm_torch(x.detach(), weight.detach(), 1e-5, residual.detach())
    grad_h, grad_weight, recomputed = rms_norm_backward_torch(
        grad_out, summed, rstd, weight.detach(), grad_sum, again=again
    )
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for parent in (x, residual):
        torch.testing.assert_close(grad_h, parent.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_weight, weight.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(recomputed, out) if again else recomputed is None


def test_half_precision_gives_the_output_again_to_the_bit_and_the_weights_gradient_in_float32():
    x, weight, grad = normal(300, 16).bfloat16(), normal(16, seed=1).bfloat16(), normal(300, 16, seed=2).bfloat16()
    out, summed, rstd = rms_norm_torch(x, weight, 1e-6)
    grad_x, grad_weight, again = rms_norm_backward_torch(grad, summed, rstd, weight, again=True)
    assert grad_x.dtype == torch.bfloat16
    assert grad_weight.dtype == rstd.dtype == torch.float32
    assert torch.equal(again, out)


@on_every_backend
@pytest.mark.parametrize("hidden", [16, 80, 896])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_kernel_equals_its_twin(device, dtype, hidden, offset):
    from burnish.model.kernels.gpu.norm import rms_norm as kernel

    wide = normal(6, 2 * hidden, dtype=dtype, device=device)
    x, residual = wide[:, :hidden], normal(6, hidden, dtype=dtype, device=device, seed=1)  # x is not contiguous
    weight = normal(hidden, dtype=dtype, device=device, seed=2)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for given in (None, residual):
        out, h, rstd = kernel(x, weight, 1e-5, given, offset)
        expected = rms_norm_torch(x, weight, 1e-5, given, offset)
        assert torch.equal(h, expected.summed)
        torch.testing.assert_close(out, expected.out, **near)
        torch.testing.assert_close(rstd, expected.rstd, rtol=1e-5, atol=1e-6)
    assert kernel(x[:0], weight, 1e-5).out.shape == (0, hidden)


@on_every_backend
@pytest.mark.parametrize("hidden", [16, 80])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_backward_kernel_equals_its_twin(device, dtype, hidden, tokens, has_residual):
    from burnish.model.kernels.gpu.norm import rms_norm_backward as kernel

    x, grad, grad_sum = (normal(tokens, hidden, dtype=dtype, device=device, seed=seed) for seed in range(3))
    weight = normal(hidden, dtype=dtype, device=device, seed=3)
    rstd = rms_norm_torch(x, weight, 1e-5).rstd
    given = grad_sum if has_residual else None
    mine = kernel(grad, x, rstd, weight, given, again=True)
    expected = rms_norm_backward_torch(grad, x, rstd, weight, given, again=True)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert kernel(grad, x, rstd, weight)[2] is None


@on_every_backend
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 4, 2), (16, 2, 3)])
def test_the_layout_of_the_backward_kernel_does_not_matter(device, dtype, layout):
    from burnish.model.kernels.gpu.launch import Shared
    from burnish.model.kernels.gpu.norm import rms_norm_backward as kernel

    x, grad, grad_sum = (normal(50, 80, dtype=dtype, device=device, seed=seed) for seed in range(3))
    weight = normal(80, dtype=dtype, device=device, seed=3)
    given = grad, x, rms_norm_torch(x, weight, 1e-5).rstd, weight, grad_sum
    mine, own = (kernel(*given, again=True, shared=shared) for shared in (Shared(*layout), None))
    for a, b in zip(mine, own, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@on_every_backend
def test_the_backward_kernel_of_no_tokens_is_nothing(device, dtype):
    from burnish.model.kernels.gpu.norm import rms_norm_backward as kernel

    none = normal(0, 16, dtype=dtype, device=device)
    grad, grad_weight, _ = kernel(none, none, none[:, 0].float(), normal(16, dtype=dtype, device=device))
    assert grad.shape == (0, 16)
    assert not grad_weight.any()
