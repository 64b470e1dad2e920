"""The product for inference is torch's own."""

import pytest
import torch
import torch.nn.functional as F

from burnish.model.linear import can_prepack, inference_linear, prepack_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_the_product_that_torch_computes(dtype: torch.dtype, num_tokens: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(33, 24, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(33, generator=generator).to(dtype).requires_grad_() if with_bias else None
    # A slice of wider rows, as the heads of a joint projection are.
    x = torch.randn(num_tokens, 40, generator=generator).to(dtype)[:, 8:32]
    output = inference_linear(x, weight, bias)
    expected = F.linear(x, weight, bias)
    assert output.dtype == dtype
    assert not output.requires_grad
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected.detach())


def test_it_reads_rows_of_a_larger_weight_without_a_copy() -> None:
    whole = torch.randn(50, 16)
    x = torch.randn(5, 16)
    torch.testing.assert_close(inference_linear(x, whole[10:30]), x @ whole[10:30].t())
    whole.zero_()
    assert not inference_linear(x, whole[10:30]).any()


@pytest.mark.skipif(not can_prepack(torch.zeros(1, 1)), reason="torch was built without oneDNN")
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_prepacked_weight_gives_the_same_and_keeps_the_values_it_was_made_of(num_tokens: int) -> None:
    weight, bias, x = torch.randn(33, 16).requires_grad_(), torch.randn(33), torch.randn(num_tokens, 16)
    expected = F.linear(x, weight, bias).detach()
    prepacked = prepack_weight(weight)
    torch.testing.assert_close(inference_linear(x, weight, bias, prepacked), expected)
    with torch.no_grad():
        weight.zero_()
    if num_tokens:
        torch.testing.assert_close(inference_linear(x, weight, bias, prepacked), expected)
