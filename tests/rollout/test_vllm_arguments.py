"""vLLM's arguments from burnish's keys, without vLLM."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from burnish.config import RolloutConfig
from burnish.rollout.vllm import installed
from burnish.rollout.vllm.arguments import (
    VLLMModel,
    cache_token_bytes,
    check_parallel,
    cpu_cache_bytes,
    engine_arguments,
    engine_environment,
    sequence_length,
)
from burnish.utils import env
from burnish.utils.errors import ConfigError, RolloutError

GIB = 2**30


def llama(**overrides: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaConfig(**{**sizes, "max_position_embeddings": 4096, **overrides})


def model(**overrides: Any) -> VLLMModel:
    return VLLMModel(**{"path": "folder", "config": llama(), "dtype": torch.bfloat16, **overrides})


def rollout(**keys: Any) -> RolloutConfig:
    return RolloutConfig(**{"mode": "sync", "prompt_length": 100, "response_length": 400, **keys})


def arguments(config: RolloutConfig, device: str = "cuda", in_process: bool = True, **of_model: Any) -> dict[str, Any]:
    return engine_arguments(model(**of_model), config, torch.device(device), in_process=in_process)


def test_every_key_reaches_vllm() -> None:
    config = rollout(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=300,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        load_format="safetensors",
        cudagraph_capture_sizes=[1, 8],
        seed=7,
        tensor_model_parallel_size=2,
    )
    made = arguments(config, override_config={"rope_theta": 5.0}, trust_remote_code=True)
    expected = {
        "model": "folder", "trust_remote_code": True, "hf_overrides": {"rope_theta": 5.0}, "dtype": "bfloat16",
        "load_format": "safetensors", "seed": 7, "max_model_len": 300, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": False, "enable_prefix_caching": False, "gpu_memory_utilization": 0.3,
        "enforce_eager": True, "tensor_parallel_size": 2, "cudagraph_capture_sizes": [1, 8], "enable_sleep_mode": True,
        "distributed_executor_backend": "external_launcher", "skip_tokenizer_init": True,
    }  # fmt: skip
    assert {name: made[name] for name in expected} == expected


def test_the_older_names_of_dummy_weights_are_dummy() -> None:
    assert arguments(rollout(load_format="dummy_dtensor"))["load_format"] == "dummy"


def test_where_vllm_is_a_step_ahead_its_scheduler_loses_no_token_to_an_update() -> None:
    assert arguments(rollout())["scheduler_cls"].endswith("UpdatableScheduler")
    assert "scheduler_cls" not in arguments(rollout(), device="cpu")


def test_one_rank_needs_no_launcher_and_processes_choose_their_own() -> None:
    assert arguments(rollout())["distributed_executor_backend"] == "uni"
    assert "distributed_executor_backend" not in arguments(rollout(), in_process=False)


def test_an_engine_that_keeps_its_memory_is_not_made_to_sleep() -> None:
    assert "enable_sleep_mode" not in arguments(rollout(free_cache_engine=False))
    assert "enable_sleep_mode" not in arguments(rollout(), device="cpu")


def test_on_a_cpu_nothing_is_compiled_and_the_cache_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "total_memory", lambda: 64 * GIB)
    monkeypatch.setattr(env, "available_memory", lambda: 60 * GIB)
    made = arguments(rollout(max_num_seqs=8), device="cpu")
    assert made["enforce_eager"]
    # 500 tokens are four blocks of 128, and one more block is vLLM's own; 2 x 4 layers x 4 heads x 32 x 2 bytes a token.
    assert made["kv_cache_memory_bytes"] == (1 + 8 * 4) * 128 * 2 * 4 * 4 * 32 * 2


def test_the_cache_on_a_cpu_stays_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "total_memory", lambda: GIB)
    monkeypatch.setattr(env, "available_memory", lambda: None)
    config = rollout(max_num_seqs=10_000, gpu_memory_utilization=0.25)
    assert cpu_cache_bytes(model(), config, 500) == GIB // 4
    # Of four key-value heads each of eight ranks has one.
    tokens = [cache_token_bytes(llama(), torch.bfloat16, ranks) for ranks in (1, 2, 4, 8)]
    assert tokens == [tokens[0], tokens[0] // 2, tokens[0] // 4, tokens[0] // 4]
    monkeypatch.setattr(env, "available_memory", lambda: 100)
    with pytest.raises(ConfigError, match=r"One sequence of 500 tokens needs 1 MiB .*gpu_memory_utilization=0\.25"):
        cpu_cache_bytes(model(), config, 500)


def test_the_longest_sequence_is_the_models_or_that_of_the_keys() -> None:
    assert sequence_length(llama(), rollout()) == 500
    assert sequence_length(llama(), rollout(max_model_len=80)) == 80
    assert sequence_length(llama(max_position_embeddings=64), rollout()) == 64


def test_a_batch_has_room_for_every_sequence_and_for_a_prompt_that_is_not_cut() -> None:
    assert arguments(rollout(max_num_batched_tokens=16, max_num_seqs=64))["max_num_batched_tokens"] == 64
    config = rollout(max_num_batched_tokens=16, max_num_seqs=64, enable_chunked_prefill=False)
    assert arguments(config)["max_num_batched_tokens"] == 500


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sizes_that_divide_the_heads_or_repeat_key_value_heads_will_do(size: int) -> None:
    check_parallel(llama(), size)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_other_sizes_are_named_with_those_that_would_do(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_model_parallel_size={size} .* 8 attention heads.* 1, 2, 4, 8\."):
        arguments(rollout(tensor_model_parallel_size=size))


def test_copies_that_are_one_engine_run_in_processes() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 .*mode=async"):
        arguments(rollout(data_parallel_size=2))
    assert arguments(rollout(data_parallel_size=2), in_process=False)["data_parallel_size"] == 2


@pytest.mark.parametrize(("rank", "held"), [(1, 1), (4, 8), (16, 16), (33, 64)])
def test_adapters_have_room(rank: int, held: int) -> None:
    made = arguments(rollout(), lora_rank=rank)
    assert (made["enable_lora"], made["max_loras"], made["max_lora_rank"]) == (True, 1, held)


def test_a_rank_that_vllm_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_rank=600"):
        arguments(rollout(), lora_rank=600)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    made = engine_environment(in_process=True)
    assert "VLLM_LOGGING_LEVEL" not in made
    assert (made["VLLM_USE_V2_MODEL_RUNNER"], made["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("0", "0")
    assert engine_environment(in_process=False)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_version", lambda: None)
    with pytest.raises(RolloutError, match=r"vllm needs vLLM, which is not installed.*burnish\[vllm\]"):
        installed.check_installed()


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0", "0.8"])
def test_another_vllm_is_refused_with_those_that_fit(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_version", lambda: ("vllm", version))
    with pytest.raises(RolloutError, match=rf"vllm {version} is installed.*vllm>=0\.21"):
        installed.check_installed()


@pytest.mark.parametrize("version", ["0.21.0", "0.21.0+cu129", "0.28.1rc1", "0.32.0"])
def test_a_known_vllm_will_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "vllm_version", lambda: ("vllm", version))
    assert installed.check_installed() == version


def test_no_vllm_is_imported_before_an_engine_is_made() -> None:
    code = (
        "import sys; from burnish.rollout import get_rollout_cls; get_rollout_cls('vllm'); "
        "sys.exit('vllm is imported' if 'vllm' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
