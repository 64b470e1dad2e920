"""The fused head: values, closed-form gradients, chunks, precision."""

import pytest
import torch
from torch import Tensor

from burnish.model.head import HEAD_OUTPUTS, LogitTransform, fused_head, head_logits

TRANSFORMS = {"plain": LogitTransform(), "scaled": LogitTransform(0.4), "capped": LogitTransform(1.5, 2.0)}


def inputs(dtype: torch.dtype = torch.float64, tokens: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(tokens, 8), (11, 8), (11,)]
    )
    labels = torch.randint(0, 11, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_equal_those_of_full_logits(name: str) -> None:
    hidden, weight, bias, labels = inputs()
    ours = fused_head(
        hidden,
        weight,
        labels,
        bias=bias,
        transform=TRANSFORMS[name],
        temperature=0.7,
        outputs=HEAD_OUTPUTS,
        chunk_size=5,
    )
    log_probs = (head_logits(hidden, weight, bias, TRANSFORMS[name]) / 0.7).log_softmax(-1)
    torch.testing.assert_close(ours["log_probs"], log_probs.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(ours["entropy"], -(log_probs.exp() * log_probs).sum(-1))
    torch.testing.assert_close(ours["sum_pi_squared"], (2 * log_probs).exp().sum(-1))


@pytest.mark.parametrize("outputs", [("log_probs",), ("entropy",), HEAD_OUTPUTS])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_closed_form_gradients_equal_numerical_ones(name: str, outputs: tuple[str, ...]) -> None:
    hidden, weight, bias, labels = inputs(tokens=5)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        values = fused_head(
            hidden,
            weight,
            labels,
            bias=bias,
            transform=TRANSFORMS[name],
            temperature=1.3,
            outputs=outputs,
            chunk_size=2,
        )
        return tuple(values.values())

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_chunk_size_changes_nothing() -> None:
    results = []
    for chunk_size in (1, 4, 100, None):
        hidden, weight, _, labels = inputs()
        values = fused_head(hidden, weight, labels, outputs=HEAD_OUTPUTS, chunk_size=chunk_size)
        sum(value.square().sum() for value in values.values()).backward()
        results.append((*values.values(), hidden.grad, weight.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_bf16_states_give_float32_results_with_float32_sums() -> None:
    hidden, weight, _, labels = inputs(torch.bfloat16, tokens=400)
    values = fused_head(hidden, weight, labels, outputs=HEAD_OUTPUTS, chunk_size=1)
    assert all(value.dtype == torch.float32 for value in values.values())
    values["log_probs"].sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    fused_head(exact_hidden, exact_weight, labels)["log_probs"].sum().backward()
    # 400 chunks added up in bf16 would be off by several percent.
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert float(error) < 0.01


def test_no_labels_give_no_values_and_zero_gradients() -> None:
    hidden, weight, _, _ = inputs()
    values = fused_head(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), outputs=HEAD_OUTPUTS)
    sum(value.sum() for value in values.values()).backward()
    assert all(value.shape == (0,) for value in values.values())
    assert float(weight.grad.abs().max()) == 0.0
