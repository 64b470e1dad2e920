"""The packed forward gives what transformers gives, row by row."""

import pytest
import torch
from transformers import PreTrainedModel

from burnish.model.attention import PackedContext, plain_attention
from burnish.model.packing import pack
from burnish.model.padded_attention import causal_attention
from burnish.model.policy import PolicyModule
from burnish.utils.errors import ModelError
from tests.model.tiny_models import FAMILIES, build, padded_rows, plain_log_probs, random_rows

# Short and long rows, so that attention works in several buckets and beyond the sliding window.
LENGTHS = [(1, 3), (5, 9), (20, 7), (3, 1), (9, 12), (2, 2)]


def packed_log_probs(model: PreTrainedModel, rows: dict[str, torch.Tensor], temperature: float = 1.0) -> torch.Tensor:
    return PolicyModule(model)(pack(**rows), temperature)["log_probs"].double()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_equal_a_plain_forward(family: str) -> None:
    model = build(family)
    prompts, responses = random_rows(LENGTHS)
    with torch.no_grad():
        ours = packed_log_probs(model, padded_rows(prompts, responses), temperature=0.7)
    torch.testing.assert_close(ours, plain_log_probs(model, prompts, responses, 0.7), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2_softcaps"])
def test_padding_side_and_batch_composition_do_not_matter(family: str) -> None:
    model = build(family, torch.float64)
    prompts, responses = random_rows(LENGTHS)
    with torch.no_grad():
        left, right = (packed_log_probs(model, padded_rows(prompts, responses, side)) for side in ("left", "right"))
        order = [4, 2, 0]
        others = packed_log_probs(model, padded_rows([prompts[i] for i in order], [responses[i] for i in order]))
    torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
    torch.testing.assert_close(others, left[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma2_softcaps"])
def test_gradient_of_a_packed_row_is_the_sum_of_its_rows_gradients(family: str) -> None:
    model = build(family, torch.float64)
    prompts, responses = random_rows(LENGTHS)
    packed_log_probs(model, padded_rows(prompts, responses)).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    # transformers' eager softmax is float32 even in a float64 model; its sdpa is not, but has no soft-cap.
    plain, atol = ("eager", 1e-5) if family == "gemma2_softcaps" else ("sdpa", 1e-10)
    with plain_attention(model, plain):
        for prompt, response in zip(prompts, responses, strict=True):
            log_probs = model(torch.tensor([prompt + response]), use_cache=False).logits[0].log_softmax(-1)
            log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=atol, rtol=100 * atol)


def test_ratio_is_one_whatever_the_micro_batches() -> None:
    model = build("qwen2")
    prompts, responses = random_rows([(4, 6)] * 8)
    with torch.no_grad():
        together = packed_log_probs(model, padded_rows(prompts, responses))
        alone = torch.cat(
            [packed_log_probs(model, padded_rows([p], [r])) for p, r in zip(prompts, responses, strict=True)]
        )
    assert float(((together - alone).exp() - 1).abs().max()) < 1e-5


def test_temperature_divides_the_logits_of_log_probs_and_entropy() -> None:
    model = build("llama", torch.float64)
    prompts, responses = random_rows([(3, 4)])
    rows = padded_rows(prompts, responses)
    for temperature in (0.5, 1.5):
        with torch.no_grad():
            outputs = PolicyModule(model)(pack(**rows), temperature, ("log_probs", "entropy", "sum_pi_squared"))
            with plain_attention(model, "sdpa"):
                logits = model(rows["input_ids"], use_cache=False).logits[0, 2:-1] / temperature
        log_probs = logits.log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(responses[0])[:, None])[:, 0]
        torch.testing.assert_close(outputs["log_probs"][0], expected)
        torch.testing.assert_close(outputs["entropy"][0], -(log_probs.exp() * log_probs).sum(-1))
        torch.testing.assert_close(outputs["sum_pi_squared"][0], (2 * log_probs).exp().sum(-1))


def test_greedy_is_scored_under_temperature_one_and_a_negative_one_is_refused() -> None:
    policy = PolicyModule(build("llama"))
    packed = pack(**padded_rows(*random_rows([(3, 4)])))
    with torch.no_grad():
        assert torch.equal(policy(packed, 0.0)["log_probs"], policy(packed, 1.0)["log_probs"])
        with pytest.raises(ValueError, match="at least 0"):
            policy(packed, -0.5)


def test_a_model_called_without_a_context_says_how_to_call_it() -> None:
    with pytest.raises(ModelError, match="attention_context"):
        build("llama")(torch.tensor([[1, 2]]), use_cache=False)


def test_recomputed_activations_change_no_gradient() -> None:
    from burnish.model.activations import checkpoint_activations

    rows = padded_rows(*random_rows(LENGTHS))
    gradients = []
    for recompute in (False, True):
        model = build("gemma2_softcaps", torch.float64)
        if recompute:
            checkpoint_activations(model)
        model.train()
        packed_log_probs(model, rows).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_packed_attention_equals_a_masked_softmax(window: int | None, softcap: float | None) -> None:
    lengths = [7, 1, 2, 6, 30]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q = torch.randn(1, 4, total, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, total, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    context = PackedContext(lengths)
    assert len(context.padding.buckets) > 1
    ours = context.attend(torch.nn.Module(), q, k, v, scaling=0.3, sliding_window=window, softcap=softcap)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(total)[:, None] - torch.arange(total)
    visible = (segment[:, None] == segment) & (distance >= 0) & (distance < (window or total))
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    expected = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(ours, expected.transpose(1, 2), atol=1e-10, rtol=0)


def test_attention_of_one_row_is_causal() -> None:
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    changed = q.clone()
    changed[:, :, 3:] += 1
    before, after = (
        causal_attention(x, x, x, scaling=0.5, sliding_window=None, softcap=None)[:, :, :3] for x in (q, changed)
    )
    assert torch.equal(before, after)
