import pytest
import torch
import torch.nn.functional as F

from burnish.rollout.native.kernels import silu_mul
from burnish.rollout.native.kernels.activation import silu_mul_torch
from tests.rollout.kernels.cases import TOLERANCE, assert_rounded_alike, normal, on_both_cpu_backends, on_every_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_rounds_as_hugging_faces_mlp_does_and_leaves_its_input(cpu_backend, dtype):
    gate_up = normal(5, 2 * 24, dtype=dtype)
    before = gate_up.clone()
    expected = F.silu(gate_up[:, :24]) * gate_up[:, 24:]
    assert_rounded_alike(silu_mul(gate_up), expected, cpu_backend)
    assert torch.equal(gate_up, before)


@on_both_cpu_backends
def test_it_is_the_formula():
    gate, up = normal(4, 10), normal(4, 10, seed=1)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), 1)).double(), expected, rtol=1e-6, atol=1e-6)


@on_every_backend
@pytest.mark.parametrize("intermediate", [24, 2500])
def test_the_kernel_equals_its_twin(device, dtype, intermediate):
    from burnish.rollout.native.kernels.gpu.activation import silu_mul as kernel

    gate_up = 3 * normal(3, 2 * intermediate, dtype=dtype, device=device)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(kernel(gate_up), silu_mul_torch(gate_up), **near)
    # A gate so low that its exponential overflows is a gate that is shut.
    shut = torch.tensor([[-200.0, 2.0]], dtype=dtype, device=device)
    assert kernel(shut).abs().item() == 0
