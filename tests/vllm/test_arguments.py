"""``engine_kwargs.vllm`` against the fields that the installed vLLM has."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import dataclasses
from pathlib import Path

import torch
from transformers import GPTNeoXConfig
from vllm.engine.arg_utils import EngineArgs

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.rollout.vllm.arguments import VLLMModel, engine_arguments, own_arguments
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.installed import engine_argument_names
from burnish.utils.errors import ConfigError, RolloutError
from tests.rollout.contract import tiny_llama


def test_the_users_own_arguments_win() -> None:
    config = RolloutConfig(mode="sync")
    config.engine_kwargs.vllm = {"enforce_eager": False, "max_logprobs": 7}
    model = VLLMModel(path="folder", config=tiny_llama().config, dtype=torch.float32)
    made = engine_arguments(model, config, torch.device("cpu"), in_process=True)
    assert (made["enforce_eager"], made["max_logprobs"]) == (False, 7)


def test_overrides_of_the_model_for_vllm_come_on_top_of_the_policys() -> None:
    config = RolloutConfig(mode="sync")
    config.engine_kwargs.vllm = {"hf_overrides": {"head_dtype": "float32"}}
    model = VLLMModel(
        path="folder", config=tiny_llama().config, dtype=torch.float32, override_config={"rms_norm_eps": 1e-3}
    )
    made = engine_arguments(model, config, torch.device("cpu"), in_process=True)
    assert made["hf_overrides"] == {"rms_norm_eps": 1e-3, "head_dtype": "float32"}
    assert config.engine_kwargs.vllm == {"hf_overrides": {"head_dtype": "float32"}}


def test_the_names_that_are_read_without_vllm_are_its_own() -> None:
    assert engine_argument_names() == {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("in_process", [True, False])
def test_every_argument_is_one_of_vllms(device: str, in_process: bool) -> None:
    config = RolloutConfig(cudagraph_capture_sizes=[1])
    model = VLLMModel(path="folder", config=tiny_llama().config, dtype=torch.float32, lora_rank=3)
    made = engine_arguments(model, config, torch.device(device), in_process=in_process)
    assert set(made) <= {field.name for field in dataclasses.fields(EngineArgs)}


def test_an_argument_that_vllm_does_not_have_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.vllm\.enforce_eagr=True: .* Did you mean 'enforce_eager'"):
        own_arguments({"enforce_eagr": True})


@pytest.mark.parametrize(
    "name",
    [
        *("model", "worker_extension_cls", "speculative_config", "tensor_parallel_size"),
        "max_model_len",  # A shorter one would cut responses, with nothing said.
        "dtype",  # Another one could not hold what it is sent.
        "distributed_executor_backend",  # Weights are handed over as the mode has it.
    ],
)
def test_what_burnish_builds_on_is_not_the_users(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.vllm\.{name}=.* cannot be set"):
        own_arguments({name: 1})


def test_a_family_that_vllm_runs_by_the_trainers_own_classes_is_refused_in_the_trainers_process(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    build_causal_lm(config).save_pretrained(tmp_path)
    model = VLLMModel(path=str(tmp_path), config=config, dtype=torch.float32)
    with pytest.raises(RolloutError, match=r"vLLM has no model of its own for .*rollout\.mode=async"):
        VLLMRollout(model, RolloutConfig(mode="sync", prompt_length=8, response_length=8))
