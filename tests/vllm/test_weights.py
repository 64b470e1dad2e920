"""Weights in vLLM: what is sent arrives, whole and everywhere, and what does not is found and named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

from tests.vllm.weight_models import (
    ENVIRONMENT,
    FAMILIES,
    VOCAB_SIZE,
    engine_log_probs,
    model_log_probs,
    moved,
    sent,
    stream,
    tiny_model,
    update,
    vllm_engine,
)

TOKENS = torch.randint(3, VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Tied, with biases: of what can go wrong most."""
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with vllm_engine(model, tmp_path_factory.mktemp("qwen2")) as llm:
        yield llm


@pytest.fixture
def whole_engine(engine: Any, model: PreTrainedModel) -> Iterator[Any]:
    """``engine``, for a test that leaves it half filled or broken."""
    update(engine, stream(model))
    yield engine
    engine.collective_rpc("begin_update", args=(0,))
    update(engine, stream(model))
    assert engine.collective_rpc("fingerprints")[0] == sent(stream(model))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_after_each_update_the_engine_is_the_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    with vllm_engine(model, tmp_path) as llm:
        assert (engine_log_probs(llm, TOKENS) - model_log_probs(model, TOKENS)).abs().max() > 0.1
        for version in (1, 2):
            counts = update(llm, stream(moved(model)), version)
            assert counts["num_tensors"] == len(stream(model))
            assert llm.collective_rpc("fingerprints") == [sent(stream(model))]
            torch.testing.assert_close(
                engine_log_probs(llm, TOKENS), model_log_probs(model, TOKENS), atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_it_arrives_in_half_precision_in_a_compiled_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    with vllm_engine(model, tmp_path, enforce_eager=False) as llm:
        for version in (1, 2):
            update(llm, stream(moved(model, 0.02)), version)
            assert llm.collective_rpc("fingerprints") == [sent(stream(model))]
            torch.testing.assert_close(
                engine_log_probs(llm, TOKENS), model_log_probs(model, TOKENS), atol=0.1, rtol=0.02
            )


@pytest.mark.parametrize("bucket", [1, 3, 1000])
def test_any_number_of_buckets_is_the_same(engine: Any, model: PreTrainedModel, bucket: int) -> None:
    update(engine, stream(tiny_model("qwen2", seed=5)))
    counts = update(engine, stream(model), bucket=bucket)
    assert counts["num_bytes"] == sum(tensor.nbytes for _, tensor in stream(model))
    assert engine.collective_rpc("fingerprints")[0] == sent(stream(model))


def test_a_tensor_may_be_overwritten_as_soon_as_the_next_is_asked_for(engine: Any, model: PreTrainedModel) -> None:
    def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(tensor.numel() for _, tensor in stream(model)))
        for name, tensor in stream(model):
            part = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            yield name, part
            buffer.fill_(torch.nan)

    update(engine, stream(tiny_model("qwen2", seed=5)))
    engine.collective_rpc("begin_update", args=(1,))
    engine.collective_rpc("take_weights", args=(one_buffer(),))
    engine.collective_rpc("end_update")
    assert engine.collective_rpc("fingerprints")[0] == sent(stream(model))


def test_a_tied_pair_may_come_under_both_names(engine: Any, model: PreTrainedModel) -> None:
    weights = [*stream(model), ("lm_head.weight", model.lm_head.weight.detach())]
    update(engine, weights)
    assert engine.collective_rpc("fingerprints")[0] == sent(weights)


def test_a_tied_pair_that_is_none_is_found(whole_engine: Any, model: PreTrainedModel) -> None:
    weights = [*stream(model), ("lm_head.weight", model.lm_head.weight.detach() + 1)]
    update(whole_engine, weights)
    held, expected = whole_engine.collective_rpc("fingerprints")[0], sent(weights)
    assert [name for name in expected if held[name] != expected[name]] == ["lm_head.weight"]


def test_an_unknown_name_is_an_error(whole_engine: Any, model: PreTrainedModel) -> None:
    # vLLM's loader would skip this one without a word.
    with pytest.raises(Exception, match=r"model.layers.0.self_attn.o_proj.bias.*does not have"):
        update(whole_engine, [*stream(model), ("model.layers.0.self_attn.o_proj.bias", torch.zeros(128))])


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.bias", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_missing_name_is_an_error(whole_engine: Any, model: PreTrainedModel, name: str) -> None:
    with pytest.raises(Exception, match=rf"without '{name}' and 0 other"):
        update(whole_engine, [(other, tensor) for other, tensor in stream(model) if other != name])


def test_a_wrong_shape_is_an_error(whole_engine: Any, model: PreTrainedModel) -> None:
    # As many rows as key and value heads together have: the loader would take some of them.
    wrong = [(name, torch.zeros(128, 128) if "k_proj.weight" in name else tensor) for name, tensor in stream(model)]
    with pytest.raises(Exception, match=r"k_proj.weight' has shape \[128, 128\], vLLM's \[64, 128\]"):
        update(whole_engine, wrong)


def test_a_name_sent_twice_is_an_error(whole_engine: Any, model: PreTrainedModel) -> None:
    with pytest.raises(Exception, match=r"'model.norm.weight' twice"):
        update(whole_engine, [*stream(model), stream(model)[-1]])


def test_weights_without_a_beginning_are_an_error(engine: Any, model: PreTrainedModel) -> None:
    with pytest.raises(Exception, match="begin_update"):
        engine.collective_rpc("take_weights", args=(stream(model)[:1],))


def test_adapters_of_an_engine_without_any_are_an_error(whole_engine: Any, model: PreTrainedModel) -> None:
    adapter = ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(4, 128))
    with pytest.raises(Exception, match=r"q_proj.lora_A.weight'.*without adapters"):
        update(whole_engine, [*stream(model), adapter])


def test_what_the_loader_leaves_out_is_named(
    whole_engine: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _vllm_model(whole_engine)
    load = type(held).load_weights
    monkeypatch.setattr(
        type(held),
        "load_weights",
        lambda self, weights: load(self, ((n, t) for n, t in weights if n != "model.norm.weight")),
    )
    with pytest.raises(Exception, match=r"left 'model.norm.weight' out"):
        update(whole_engine, stream(moved(tiny_model("qwen2"))))


def test_what_the_loader_says_it_took_and_did_not_is_found(
    whole_engine: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = dict(_vllm_model(whole_engine).named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
    load = parameter.weight_loader
    monkeypatch.setattr(
        parameter, "_weight_loader", lambda p, tensor, shard=None: None if shard == "v" else load(p, tensor, shard)
    )
    weights = stream(moved(tiny_model("qwen2")))
    update(whole_engine, weights)
    held, expected = whole_engine.collective_rpc("fingerprints")[0], sent(weights)
    assert [name for name in expected if held[name] != expected[name]] == ["model.layers.1.self_attn.v_proj.weight"]


@pytest.mark.parametrize("layer", ["model.embed_tokens", "model.layers.0.mlp.down_proj"])
def test_a_layer_that_computes_with_an_old_copy_is_found(
    whole_engine: Any, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    from burnish.rollout.vllm import cpu_linear

    # What vLLM itself does with a tied head on a CPU: the weight is new, the packed copy of it is not.
    pack_again = cpu_linear.pack_again
    held = _vllm_model(whole_engine)
    module = held.get_submodule(layer)

    def forget_one(model: torch.nn.Module) -> None:
        linear = module.__dict__.pop("cpu_linear")
        pack_again(model)
        module.cpu_linear = linear

    monkeypatch.setattr(cpu_linear, "pack_again", forget_one)
    update(whole_engine, stream(moved(tiny_model("qwen2"), 1e-3)))
    with pytest.raises(Exception, match=f"old copy of '{layer}.weight'"):
        whole_engine.collective_rpc("fingerprints")


def _vllm_model(llm: Any) -> torch.nn.Module:
    (model,) = llm.llm_engine.apply_model(lambda model: model)
    return model
