"""The fused head: values, closed-form gradients, chunks, precision, and what it keeps."""

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.model import head as head_module
from burnish.model import head_chunks
from burnish.model.head import HEAD_OUTPUTS, LogitTransform, fused_head, fused_kl

TRANSFORMS = {"plain": LogitTransform(), "scaled": LogitTransform(0.4), "capped": LogitTransform(1.5, 2.0)}
DIFFERENTIABLE = ("log_probs", "entropy", "sum_pi_squared")
SUBSETS = list(chain.from_iterable(combinations(DIFFERENTIABLE, size) for size in (1, 2, 3)))
VOCAB, HIDDEN = 11, 8


def inputs(
    dtype: torch.dtype = torch.float64, tokens: int = 13, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]
    )
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def full_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform, temperature: float
) -> Tensor:
    """[tokens, vocab], by the definition."""
    logits = transform.scale * (hidden @ weight.T + (0 if bias is None else bias))
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return (logits / temperature).log_softmax(-1)


def naive_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = TRANSFORMS["plain"],
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Every output of the fused head, from full logits that autograd differentiates."""
    log_probs = full_log_probs(hidden, weight, bias, transform, temperature)
    return {
        "log_probs": log_probs.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "sum_pi_squared": (2 * log_probs).exp().sum(-1),
        "top1_log_probs": log_probs.amax(-1),
    }


def weighted_sum(values: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """A loss in which every token and output has another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for number, name in enumerate(names):
        weights = torch.randn(len(values[name]), generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        total = total + (values[name] * weights).sum()
    return total


@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [1, 5, None])
@pytest.mark.parametrize("outputs", SUBSETS, ids="+".join)
def test_values_and_gradients_equal_those_of_full_logits(
    outputs: tuple[str, ...], chunk_size: int | None, name: str, has_bias: bool
) -> None:
    results = []
    for function, more in ((naive_head, {}), (fused_head, {"outputs": HEAD_OUTPUTS, "chunk_size": chunk_size})):
        hidden, weight, bias, labels = inputs()
        given: dict[str, Any] = {"bias": bias if has_bias else None, "transform": TRANSFORMS[name], "temperature": 0.7}
        values = function(hidden, weight, labels, **given, **more)
        weighted_sum(values, outputs).backward()
        grads = [hidden.grad, weight.grad, *([bias.grad] if has_bias else [])]
        results.append([*(values[key].detach() for key in HEAD_OUTPUTS), *grads])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_only_what_is_asked_for_is_given() -> None:
    hidden, weight, _, labels = inputs()
    assert list(fused_head(hidden, weight, labels)) == ["log_probs"]
    assert set(fused_head(hidden, weight, labels, outputs=("entropy", "top1_log_probs"))) == {
        "entropy",
        "top1_log_probs",
    }


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_label_has_the_top_log_prob_exactly_where_it_is_the_most_likely_token(
    name: str, dtype: torch.dtype
) -> None:
    hidden, weight, _, labels = inputs(dtype, tokens=200)
    likely = full_log_probs(hidden.double(), weight.double(), None, TRANSFORMS[name], 1.0).argmax(-1)
    labels[:100] = likely[:100]
    values = fused_head(
        hidden, weight, labels, transform=TRANSFORMS[name], temperature=0.9, outputs=HEAD_OUTPUTS, chunk_size=64
    )
    assert not values["top1_log_probs"].requires_grad
    equal = values["log_probs"] == values["top1_log_probs"]
    # Rounding of bf16 logits makes ties, and may exchange two that are nearly tied.
    assert float((equal == (labels == likely)).double().mean()) >= (0.97 if dtype == torch.bfloat16 else 1.0)


def test_an_output_without_gradient_costs_the_backward_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = []
    real = head_module.head_gradient_

    def recording(*arguments: Any) -> Tensor:
        flows.append([flow is not None for flow in arguments[4]])
        return real(*arguments)

    monkeypatch.setattr(head_module, "head_gradient_", recording)
    hidden, weight, _, labels = inputs()
    fused_head(hidden, weight, labels, outputs=HEAD_OUTPUTS)["log_probs"].sum().backward()
    assert flows == [[True, False, False]]


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(trained: str) -> None:
    hidden, weight, _, labels = inputs()
    expected = torch.autograd.grad(naive_head(hidden, weight, labels)["log_probs"].sum(), (hidden, weight))
    (weight if trained == "hidden" else hidden).requires_grad_(False)
    fused_head(hidden, weight, labels, chunk_size=4)["log_probs"].sum().backward()
    for tensor, grad, name in zip((hidden, weight), expected, ("hidden", "weight"), strict=True):
        if name == trained:
            torch.testing.assert_close(tensor.grad, grad)
        else:
            assert tensor.grad is None


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
        return result


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> Tensor:
    values = fused_head(hidden, weight, labels, outputs=HEAD_OUTPUTS, chunk_size=chunk_size)
    return values["log_probs"].sum() + values["entropy"].sum()


def kl_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> Tensor:
    return fused_kl(hidden, weight, hidden.detach() + 1, weight.detach(), chunk_size=chunk_size).sum()


LOSSES = pytest.mark.parametrize("loss", [head_loss, kl_loss])
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@LOSSES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tensor_of_either_pass_is_larger_than_a_chunk(loss: Loss, dtype: torch.dtype) -> None:
    hidden, weight, _, labels = inputs(dtype, tokens=400)
    with LargestTensor() as largest:
        loss(hidden, weight, labels, 40).backward()
    assert largest.elements == max(40 * VOCAB, hidden.numel())
    assert largest.elements < len(labels) * VOCAB


@LOSSES
def test_nothing_of_the_vocabularys_size_is_kept_and_nothing_at_all_without_a_gradient(loss: Loss) -> None:
    hidden, weight, _, labels = inputs(tokens=400)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        loss(hidden, weight, labels, 100)
        assert max(x.numel() for x in kept) == hidden.numel()
        kept.clear()
        loss(hidden.detach(), weight.detach(), labels, 100)
        with torch.no_grad():
            loss(hidden, weight, labels, 100)
    assert kept == []


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_exact_to_the_precision_of_the_states(name: str, dtype: torch.dtype, near: float) -> None:
    results = []
    for wide in (torch.float64, dtype):
        hidden, weight, bias, labels = (x.detach().to(dtype) for x in inputs(tokens=60))
        hidden, weight, bias = (x.to(wide).requires_grad_() for x in (hidden, weight, bias))
        values = fused_head(
            hidden,
            weight,
            labels.long(),
            bias=bias,
            transform=TRANSFORMS[name],
            temperature=0.7,
            outputs=HEAD_OUTPUTS,
            chunk_size=16,
        )
        weighted_sum(values, DIFFERENTIABLE).backward()
        assert all(value.dtype == torch.promote_types(wide, torch.float32) for value in values.values())
        results.append(([*values.values()], [hidden.grad, weight.grad, bias.grad]))
    for expected, ours in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=near, atol=near)
    for expected, ours in zip(results[0][1], results[1][1], strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - expected).norm() / expected.norm()) < near / 2


def test_the_sum_over_many_chunks_is_float32() -> None:
    hidden, weight, _, labels = inputs(torch.bfloat16, tokens=400)
    fused_head(hidden, weight, labels, chunk_size=1)["log_probs"].sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    fused_head(exact_hidden, exact_weight, labels)["log_probs"].sum().backward()
    # 400 chunks added up in bf16 would be off by several percent.
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert float(error) < 0.01


def test_an_entropy_near_zero_keeps_its_digits() -> None:
    """log(normalizer) minus the mean logit would lose them: both are 40."""
    hidden, weight = torch.ones(1, 1), torch.full((100, 1), 25.0)
    weight[3] = 40.0
    got = fused_head(hidden, weight, torch.tensor([3]), outputs=("entropy",))["entropy"].item()
    exact = naive_head(hidden.double(), weight.double(), torch.tensor([3]))["entropy"].item()
    assert got == pytest.approx(exact, rel=0.01)
    assert 0 < exact < 1e-3


@pytest.mark.parametrize("tokens", [1, 130, 700, 3000, 100_000])
@pytest.mark.parametrize("vocab", [1_000, 49_152, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_cover_the_tokens_evenly_within_their_bound(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.empty(tokens, 1, dtype=dtype), torch.empty(vocab, 1, dtype=dtype)
    chunks = [rows.stop - rows.start for rows in head_chunks.Chunks(hidden, weight, None)]
    size = head_chunks.ON_CPU if dtype == torch.float32 else head_chunks.ON_CPU_IN_HALF
    assert sum(chunks) == tokens
    assert max(chunks) <= max(size.least, size.elements // vocab)
    # All but the last are one size, and the last lacks at most one tile for each of the others.
    assert len(set(chunks[:-1])) <= 1
    assert chunks[0] - chunks[-1] <= size.tile * len(chunks)


def test_no_labels_give_no_values_and_zero_gradients() -> None:
    hidden, weight, bias, _ = inputs()
    values = fused_head(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), bias=bias, outputs=HEAD_OUTPUTS)
    kl = fused_kl(hidden[:0], weight, hidden[:0].detach(), weight.detach(), bias=bias)
    (sum(value.sum() for value in values.values()) + kl.sum()).backward()
    assert all(value.shape == (0,) for value in (*values.values(), kl))
    assert float(weight.grad.abs().max()) == float(bias.grad.abs().max()) == 0.0
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_size", [1, 5, None])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_kl_and_its_gradients_equal_those_of_full_logits(name: str, chunk_size: int | None, has_bias: bool) -> None:
    other_hidden, other_weight, other_bias, _ = (x.detach() for x in inputs(seed=1))
    transforms = {"transform": TRANSFORMS[name], "other_transform": TRANSFORMS["scaled"]}
    results = []
    for is_ours in (False, True):
        hidden, weight, bias, _ = inputs()
        biases = (bias, other_bias) if has_bias else (None, None)
        if is_ours:
            kl = fused_kl(
                hidden,
                weight,
                other_hidden,
                other_weight,
                bias=biases[0],
                other_bias=biases[1],
                temperature=0.7,
                chunk_size=chunk_size,
                **transforms,
            )
        else:
            mine = full_log_probs(hidden, weight, biases[0], transforms["transform"], 0.7)
            theirs = full_log_probs(other_hidden, other_weight, biases[1], transforms["other_transform"], 0.7)
            kl = (mine.exp() * (mine - theirs)).sum(-1)
        weighted_sum({"kl": kl}, ("kl",)).backward()
        results.append([kl.detach(), hidden.grad, weight.grad, *([bias.grad] if has_bias else [])])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_kl_of_a_policy_to_itself_is_nothing_and_of_a_near_one_keeps_its_digits() -> None:
    hidden, weight, _, _ = inputs(torch.float32, tokens=50)
    same = fused_kl(hidden, weight, hidden.detach(), weight.detach())
    same.sum().backward()
    assert float(same.detach().abs().max()) < 1e-6
    assert float(hidden.grad.abs().max()) < 1e-5
    near = hidden.detach() + 0.02 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    ours = fused_kl(hidden, weight, near, weight).detach().double()
    mine, theirs = (
        full_log_probs(x.detach().double(), weight.detach().double(), None, TRANSFORMS["plain"], 1.0)
        for x in (hidden, near)
    )
    torch.testing.assert_close(ours, (mine.exp() * (mine - theirs)).sum(-1), rtol=1e-2, atol=3e-7)


def test_kl_of_policies_with_other_vocabularies_or_tokens_is_refused() -> None:
    hidden, weight, _, _ = inputs()
    with pytest.raises(ValueError, match="13 tokens and 11 ids, the other 13 and 10"):
        fused_kl(hidden, weight, hidden, weight[:10])
    with pytest.raises(ValueError, match="the other 12 and 11"):
        fused_kl(hidden, weight, hidden[:12], weight)
