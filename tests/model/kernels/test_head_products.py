"""The head's product and the softmax after it in one kernel, against the exact logits in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.model.kernels.head import OutputGrads, Statistics, head_gradient_, head_statistics
from tests.model.kernels.test_head_kernels import FLOWS, GRADIENT_TOLERANCE, SOFTMAXES, assert_near, softmaxes
from tests.rollout.kernels.cases import BACKENDS, normal

# Half precision alone: float32 products go through cuBLAS.
in_half: Any = pytest.mark.parametrize(("device", "dtype"), [BACKENDS[1], BACKENDS[3]])
# (tokens, vocabulary): less than a tile, a tile and a piece of the next in both, an exact tile.
SHAPES = [(3, 5), (130, 300), (128, 256)]


def operands(num_tokens: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels, and the exact product; the first label is the most likely token."""
    hidden = normal(num_tokens, 128, dtype=dtype, device=device)
    weight = (0.3 * normal(vocab, 128, seed=1)).to(dtype).to(device)
    raw = hidden.double().cpu() @ weight.double().cpu().t()
    labels = torch.arange(num_tokens) * 7 % vocab
    labels[0] = raw[0].argmax()
    return hidden, weight, labels.to(device), raw


@in_half
@pytest.mark.parametrize(("num_tokens", "vocab"), SHAPES)
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_statistics_of_a_product_equal_those_of_its_logits(device, dtype, num_tokens, vocab, scale, softcap, has_bias):
    from burnish.model.kernels.gpu.head_products import product_statistics

    hidden, weight, labels, raw = operands(num_tokens, vocab, dtype, device)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, weight.t())
    exact = head_statistics(raw.clone(), labels.cpu(), exact_softmax, want_entropy=True, want_sum_squared=True)
    for entropy, squares in product((False, True), repeat=2):
        ours = product_statistics(hidden, weight, labels, softmax, want_entropy=entropy, want_sum_squared=squares)
        assert ((ours.entropy is None), (ours.sum_pi_squared is None)) == (not entropy, not squares)
        for mine, theirs in zip(ours, exact, strict=True):
            if mine is not None:
                assert_near(mine, theirs, 1e-4)
        assert has_bias or softcap or ours.log_probs[0] == ours.top1_log_probs[0]


@in_half
@pytest.mark.parametrize(("num_tokens", "vocab"), SHAPES)
@pytest.mark.parametrize(("scale", "softcap", "has_bias"), SOFTMAXES)
def test_the_gradient_of_a_product_equals_that_of_its_logits(
    device, dtype, num_tokens, vocab, scale, softcap, has_bias
):
    from burnish.model.kernels.gpu.head_products import product_gradient

    hidden, weight, labels, raw = operands(num_tokens, vocab, dtype, device)
    softmax, exact_softmax = softmaxes(scale, softcap, has_bias, weight.t())
    exact = head_statistics(raw.clone(), labels.cpu(), exact_softmax, want_entropy=True, want_sum_squared=True)
    statistics = Statistics(*(None if x is None else x.float().to(device) for x in exact))
    for flows in FLOWS:
        grads = [normal(num_tokens, device=device, seed=number) if flows[number] else None for number in range(3)]
        out = torch.full((num_tokens, vocab), float("nan"), dtype=dtype, device=device)
        mine = product_gradient(hidden, weight, labels, softmax, statistics, OutputGrads(*grads), out)
        wide = OutputGrads(*(None if g is None else g.double().cpu() for g in grads))
        theirs = head_gradient_(raw.clone(), labels.cpu(), exact_softmax, exact, wide, torch.float64)
        assert float((mine.double().cpu() - theirs).norm() / theirs.norm()) < GRADIENT_TOLERANCE[dtype]


@in_half
def test_certain_and_impossible_tokens_are_finite(device, dtype):
    from burnish.model.kernels.gpu.head_products import product_statistics

    hidden, weight, labels, _ = operands(3, 300, dtype, device)
    weight[7] = 0.0
    weight[7, 0] = 500.0
    hidden[:, 0] = 10.0
    softmax, _ = softmaxes(1.0, None, False, weight.t())
    ours = product_statistics(hidden, weight, labels, softmax, want_entropy=True, want_sum_squared=True)
    for values in ours:
        assert values is not None
        assert bool(values.isfinite().all())
    assert_near(ours.entropy, torch.zeros(3).double(), 1e-6)  # type: ignore[arg-type]
