import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from burnish.rollout.native.kernels import rms_norm
from tests.rollout.kernels.cases import assert_rounded_alike, normal, on_both_cpu_backends

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 80, 576])
def test_it_rounds_as_llamas_norm_does(cpu_backend, dtype, hidden):
    x, module = 3 * normal(5, hidden, dtype=dtype), LlamaRMSNorm(hidden, eps=1e-5)
    module.weight.data = normal(hidden, dtype=dtype, seed=1)
    with torch.no_grad():
        assert_rounded_alike(rms_norm(x, module.weight, 1e-5), module(x), cpu_backend)


@on_both_cpu_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_in_the_dtype_and_returned(dtype):
    x, residual, weight = (normal(5, 64, dtype=dtype, seed=seed) for seed in range(3))
    before = x.clone(), residual.clone()
    out, h = rms_norm(x, weight[0], 1e-6, residual)
    assert torch.equal(h, x + residual)
    assert torch.equal(out, rms_norm(x + residual, weight[0], 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@on_both_cpu_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_is_gemmas_norm(dtype):
    x, module = normal(5, 64, dtype=dtype), GemmaRMSNorm(64, eps=1e-6)
    module.weight.data = normal(64, dtype=dtype, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, module.weight, 1e-6, offset=1.0), module(x), rtol=0, atol=1e-6)


@on_both_cpu_backends
def test_it_is_the_formula():
    x, weight = normal(7, 33), normal(33, seed=1)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)
