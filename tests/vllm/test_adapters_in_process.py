"""A policy with adapters in an engine of this process: base first, adapters in place, token for token as the native engine."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import torch
from transformers import PreTrainedModel

from burnish.config import HFModelConfig, RolloutConfig
from burnish.model.lora import adapter_config, adapter_parameters, add_adapters, hf_name, is_adapter_name
from burnish.rollout.base import RolloutResponse, SamplingParams, WeightStream
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.arguments import VLLMModel
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.weights import weights_checksum
from tests.rollout.contract import make_requests
from tests.vllm.in_process_engines import tiny_vllm_llama

SAMPLING = SamplingParams(max_new_tokens=9, temperature=1.3, eos_token_ids=(2, 7), seed=5)


def shake(model: PreTrainedModel, seed: int) -> None:
    """Other adapters."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in adapter_parameters(model):
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2


def stream(model: PreTrainedModel, *, base: bool) -> WeightStream:
    named = [(hf_name(name), parameter.detach()) for name, parameter in model.named_parameters()]
    yield from [(name, tensor) for name, tensor in named if base and not is_adapter_name(name)]
    yield from [(name, tensor) for name, tensor in named if is_adapter_name(name)]


def assert_same(mine: list[RolloutResponse], native: list[RolloutResponse]) -> None:
    assert [response.token_ids for response in mine] == [response.token_ids for response in native]
    for a, b in zip(mine, native, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4, rtol=0)


def test_adapters_of_each_version_take_the_place_of_the_last_ones(tmp_path: Path) -> None:
    model = tiny_vllm_llama()
    model.save_pretrained(tmp_path)
    add_adapters(model, HFModelConfig(path=str(tmp_path), lora_rank=4, target_modules=["all-linear"], lora_seed=1))
    described = VLLMModel(path=str(tmp_path), config=model.config, dtype=torch.float32, lora_rank=4)
    config = RolloutConfig(mode="sync", load_format="dummy", max_num_seqs=16)
    engine = VLLMRollout(described, config, adapters=adapter_config(model))
    native = NativeRollout(model, RolloutConfig(max_num_seqs=16), shares_storage=True, device="cpu")
    tokens = []
    try:
        for version in (1, 2):
            shake(model, version)
            assert engine.needs_base is (version == 1)
            engine.update_weights(stream(model, base=engine.needs_base), version)
            assert engine.weights_checksum() == weights_checksum(model)
            responses = engine.generate(make_requests(5, 3), SAMPLING)
            assert_same(responses, native.generate(make_requests(5, 3), SAMPLING))
            tokens.append([response.token_ids for response in responses])
    finally:
        engine.close()
    assert tokens[0] != tokens[1]
