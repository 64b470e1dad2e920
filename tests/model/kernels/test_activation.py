import pytest
import torch

from burnish.model.kernels.activation import silu_mul_backward_torch, silu_mul_torch
from tests.rollout.kernels.cases import TOLERANCE, normal, on_every_backend


def test_its_gradient_is_that_of_the_formula_and_the_output_takes_the_place_of_the_given_one():
    gate_up = 2 * normal(5, 2 * 7, dtype=torch.float64)
    given = gate_up.clone().requires_grad_()
    gate, up = given.chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    grad = normal(5, 7, dtype=torch.float64, seed=1)
    (expected * grad).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(silu_mul_torch(gate_up), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(silu_mul_backward_torch(grad, gate_up), given.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected.detach(), rtol=1e-12, atol=1e-12)


def test_half_precision_gives_the_output_again_to_the_bit():
    gate_up, grad = normal(20, 2 * 32).bfloat16(), normal(20, 32, seed=1).bfloat16()
    silu_mul_backward_torch(grad, gate_up)
    assert torch.equal(grad, silu_mul_torch(gate_up))


@on_every_backend
@pytest.mark.parametrize("intermediate", [24, 2500])
def test_the_kernel_equals_its_twin(device, dtype, intermediate):
    from burnish.model.kernels.gpu.activation import silu_mul as kernel

    gate_up = 3 * normal(3, 2 * intermediate, dtype=dtype, device=device)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernel(gate_up), silu_mul_torch(gate_up), **near)
    # A gate so low that its exponential overflows is a gate that is shut.
    shut = torch.tensor([[-200.0, 2.0]], dtype=dtype, device=device)
    assert kernel(shut).abs().item() == 0


@on_every_backend
@pytest.mark.parametrize("intermediate", [24, 1100])
def test_the_backward_kernel_equals_its_twin(device, dtype, intermediate):
    from burnish.model.kernels.gpu.activation import silu_mul_backward as kernel

    gate_up = 3 * normal(3, 2 * intermediate, dtype=dtype, device=device)
    gate_up[0, 0] = -200.0
    mine, theirs, third = (normal(3, intermediate, dtype=dtype, device=device, seed=1) for _ in range(3))
    near = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    expected = silu_mul_backward_torch(theirs, gate_up)
    torch.testing.assert_close(kernel(mine, gate_up), expected, **near)
    torch.testing.assert_close(kernel(third, gate_up, again=False), expected, **near)
    torch.testing.assert_close(mine, theirs, **near)
    assert kernel(mine[:0], gate_up[:0]).shape == (0, 2 * intermediate)
