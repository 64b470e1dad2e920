"""Tiny random models of the families whose attention, head and positions differ."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from burnish.model.attention import plain_attention
from burnish.model.load import build_causal_lm

VOCAB = 61

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large weights, so that a wrong mask or position shows in the log-probs.
    "initializer_range": 0.2,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON, head_dim=8),
    "mistral_sliding": MistralConfig(**_COMMON, sliding_window=4),
    "gemma2_softcaps": Gemma2Config(
        **_COMMON, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**_COMMON, head_dim=8, sliding_window=4),
    "gpt_neox": GPTNeoXConfig(**_COMMON),
    "granite": GraniteConfig(**_COMMON, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7),
    "cohere": CohereConfig(**_COMMON, logit_scale=0.25),
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=2, bos_token_id=1
    ),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The tiny model of ``family``."""
    return build_causal_lm(FAMILIES[family], dtype)


def padded_rows(prompts: list[list[int]], responses: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """Rows as the rollout makes them: prompts padded on ``side``, responses on the right."""
    prompt_width, response_width = max(map(len, prompts)), max(map(len, responses))
    ids, mask, labels = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        free = prompt_width - len(prompt)
        left, right = (free, 0) if side == "left" else (0, free)
        tail = response_width - len(response)
        ids.append([0] * left + prompt + [0] * right + response + [0] * tail)
        mask.append([0] * left + [1] * len(prompt) + [0] * right + [1] * len(response) + [0] * tail)
        labels.append([1] * len(response) + [0] * tail)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask).bool(),
        "label_mask": torch.tensor(labels).bool(),
    }


def random_rows(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    return [ids(prompt) for prompt, _ in lengths], [ids(response) for _, response in lengths]


def plain_log_probs(
    model: PreTrainedModel, prompts: list[list[int]], responses: list[list[int]], temperature: float = 1.0
) -> Tensor:
    """[batch, response] log-probs by transformers itself: one row at a time, no padding, full logits."""
    result = torch.zeros(len(prompts), max(map(len, responses)), dtype=torch.float64)
    with plain_attention(model), torch.no_grad():
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0].double() / temperature
            log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            result[row, : len(response)] = log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
    return result
