"""Tiny random models of several families, and what a vLLM engine makes of their weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from burnish.rollout.vllm.arguments import EXTENSION
from burnish.utils.fingerprint import Fingerprints

VOCAB_SIZE = 131
# vLLM pads its vocabulary to 64 and wants heads of 32 on a CPU; q, k and v differ in size.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "one-kv-head": Qwen2Config(**{**_SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=64, tie_word_embeddings=False),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=32, query_pre_attn_scalar=32),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=32, query_pre_attn_scalar=32),
    "phi3": Phi3Config(**_SHAPE),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, with biases and norms that are not those of the start."""
    torch.manual_seed(seed)
    config = copy.deepcopy(FAMILIES[family])
    # Its soft caps are only in the eager attention.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    return moved(model)


@torch.no_grad()
def moved(model: PreTrainedModel, size: float = 0.05) -> PreTrainedModel:
    """``model`` itself, after a step that changes every weight."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * size)
    return model


def stream(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Its weights, a tied pair once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def sent(weights: list[tuple[str, Tensor]]) -> dict[str, int]:
    """The fingerprints of what is sent."""
    fingerprints = Fingerprints()
    for name, tensor in weights:
        fingerprints.add(name, tensor)
    return fingerprints.read()


@contextmanager
def vllm_engine(model: PreTrainedModel, folder: Path, **arguments: Any) -> Iterator[Any]:
    """vLLM's own engine of this model's shape, with other weights than it has."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    model.save_pretrained(folder)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=64,
        worker_extension_cls=EXTENSION,
        **{
            "load_format": "dummy",
            "enforce_eager": True,
            "dtype": model.dtype,
            "enable_prefix_caching": False,
            **arguments,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def update(llm: Any, weights: list[tuple[str, Tensor]], version: int = 1, bucket: int = 7) -> dict[str, int]:
    """Sends weights, so many tensors at a time; what `WorkerExtension.end_update` says."""
    llm.collective_rpc("begin_update", args=(version,))
    for start in range(0, len(weights), bucket):
        llm.collective_rpc("take_weights", args=(weights[start : start + bucket],))
    return llm.collective_rpc("end_update")[0]


def engine_log_probs(llm: Any, token_ids: Tensor, lora_request: Any = None) -> Tensor:
    """[rows, length - 1] of the tokens behind the first, each given those before it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": row.tolist()} for row in token_ids]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
    return torch.tensor(
        [
            [output.prompt_logprobs[i][int(token)].logprob for i, token in enumerate(row) if i > 0]
            for row, output in zip(token_ids, outputs, strict=True)
        ]
    )


@torch.no_grad()
def model_log_probs(model: torch.nn.Module, token_ids: Tensor) -> Tensor:
    """As `engine_log_probs`."""
    log_probs = model(token_ids).logits.float().log_softmax(-1)
    return log_probs[:, :-1].gather(-1, token_ids[:, 1:, None])[..., 0]
