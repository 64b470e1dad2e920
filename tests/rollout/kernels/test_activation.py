import pytest
import torch
import torch.nn.functional as F

from burnish.rollout.native.kernels import silu_mul
from tests.rollout.kernels.cases import assert_rounded_alike, normal, on_both_cpu_backends


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
