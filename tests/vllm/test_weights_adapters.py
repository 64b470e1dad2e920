"""Adapters in vLLM: each version's are what is sampled with, on an unchanged base, and one that does not arrive is named."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

from burnish.model.lora import adapters_off, add_adapters, hf_name, is_adapter_name
from burnish.rollout.vllm.adapters import lora_request
from tests.vllm.weight_models import (
    ENVIRONMENT,
    VOCAB_SIZE,
    engine_log_probs,
    model_log_probs,
    sent,
    tiny_model,
    update,
    vllm_engine,
)

TOKENS = torch.randint(3, VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(0))
# alpha / rank is no power of two: what vLLM keeps is rounded.
RANK, ALPHA = 6, 10
Q_LORA_A = "model.layers.0.self_attn.q_proj.lora_A.weight"


CONFIG = {"r": RANK, "lora_alpha": ALPHA}


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    """Of the family with the most to get wrong."""
    return with_adapters(tiny_model("qwen2"))


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` itself, with adapters of every linear layer but the head and ``up_proj``."""
    settings = SimpleNamespace(
        lora_rank=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        exclude_modules=[],
        lora_adapter_path=None,
        lora_seed=0,
    )
    add_adapters(model, settings)
    return model.eval()


@pytest.fixture(scope="module")
def engine(policy: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        with vllm_engine(tiny_model("qwen2", seed=9), tmp_path_factory.mktemp("qwen2"), **arguments) as llm:
            llm.collective_rpc("use_adapters", args=(CONFIG,))
            update(llm, stream(policy))
            yield llm


def stream(policy: PreTrainedModel, adapters_only: bool = False) -> list[tuple[str, Tensor]]:
    """Base first, then adapters, under the names that they have in a weight stream."""
    named = [(hf_name(name), parameter.detach()) for name, parameter in policy.named_parameters()]
    base = [] if adapters_only else [pair for pair in named if not is_adapter_name(pair[0])]
    return base + [pair for pair in named if is_adapter_name(pair[0])]


@torch.no_grad()
def trained(policy: PreTrainedModel) -> PreTrainedModel:
    """``policy`` itself, after a step of its adapters."""
    for name, parameter in policy.named_parameters():
        if is_adapter_name(hf_name(name)):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return policy


def test_each_version_is_sampled_with_and_the_base_stays(engine: Any, policy: PreTrainedModel) -> None:
    for version in (1, 2, 3):
        update(engine, stream(trained(policy), adapters_only=version > 1), version)
        assert engine.collective_rpc("fingerprints")[0] == sent(stream(policy))
        with adapters_off(policy):
            base = model_log_probs(policy, TOKENS)
        ours = model_log_probs(policy, TOKENS)
        assert (ours - base).abs().max() > 0.1
        torch.testing.assert_close(engine_log_probs(engine, TOKENS, lora_request()), ours, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(engine_log_probs(engine, TOKENS), base, atol=1e-4, rtol=1e-4)


def test_a_new_base_comes_under_the_same_adapters(engine: Any, policy: PreTrainedModel) -> None:
    for name, parameter in policy.named_parameters():
        if not is_adapter_name(hf_name(name)):
            parameter.data.mul_(1.1)
    update(engine, stream(policy))
    assert engine.collective_rpc("fingerprints")[0] == sent(stream(policy))
    torch.testing.assert_close(
        engine_log_probs(engine, TOKENS, lora_request()), model_log_probs(policy, TOKENS), atol=2e-4, rtol=1e-4
    )


def test_an_adapter_that_is_not_sampled_with_is_found(
    engine: Any, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA

    # The adapters are taken and never reach the buffers that the model reads.
    monkeypatch.setattr(MergedQKVParallelLinearWithLoRA, "set_lora", lambda *_: None)
    update(engine, stream(trained(policy), adapters_only=True))
    held, expected = engine.collective_rpc("fingerprints")[0], sent(stream(policy))
    assert {name.split(".")[4] for name in expected if held[name] != expected[name]} == {"q_proj", "k_proj", "v_proj"}
    monkeypatch.undo()
    update(engine, stream(policy, adapters_only=True))
    assert engine.collective_rpc("fingerprints")[0] == expected


@pytest.mark.parametrize("missing", [Q_LORA_A, "model.layers.1.mlp.down_proj.lora_B.weight"])
def test_a_missing_adapter_is_an_error(engine: Any, policy: PreTrainedModel, missing: str) -> None:
    with pytest.raises(Exception, match=f"without the adapter '{missing}'"):
        update(engine, [pair for pair in stream(policy, adapters_only=True) if pair[0] != missing])


def test_no_adapters_at_all_are_an_error(engine: Any, policy: PreTrainedModel) -> None:
    with pytest.raises(Exception, match="held none"):
        update(engine, [pair for pair in stream(policy) if not is_adapter_name(pair[0])])


def test_an_adapter_of_a_layer_that_has_none_is_an_error(engine: Any, policy: PreTrainedModel) -> None:
    unknown = ("model.layers.7.self_attn.q_proj.lora_A.weight", torch.zeros(RANK, 128))
    with pytest.raises(Exception, match=r"layers.7.self_attn.q_proj.lora_A.weight'.*no place"):
        update(engine, [*stream(policy, adapters_only=True), unknown])


@pytest.mark.parametrize("shape", [(RANK, 64), (9, 128)])
def test_a_wrong_shape_or_too_high_a_rank_is_an_error(
    engine: Any, policy: PreTrainedModel, shape: tuple[int, int]
) -> None:
    wrong = [(n, torch.zeros(shape) if n == Q_LORA_A else t) for n, t in stream(policy, adapters_only=True)]
    with pytest.raises(Exception, match=rf"{Q_LORA_A}' has shape \[{shape[0]}, {shape[1]}\]"):
        update(engine, wrong)


def test_adapters_alone_do_not_do_after_half_a_base(engine: Any, policy: PreTrainedModel) -> None:
    engine.collective_rpc("begin_update", args=(1,))
    engine.collective_rpc("take_weights", args=(stream(policy)[:3],))
    with pytest.raises(Exception, match="without 'model.embed_tokens.weight'"):
        update(engine, stream(policy, adapters_only=True))
    update(engine, stream(policy))
    assert engine.collective_rpc("fingerprints")[0] == sent(stream(policy))
