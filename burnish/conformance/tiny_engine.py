"""A random Llama of a few thousand parameters in the trainer's engine, made in memory, and rows for it."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import FSDPEngine
from burnish.model.load import build_causal_lm
from burnish.protocol import DataProto

_VOCAB, _PROMPT, _RESPONSE, _NUM_ROWS = 32, 4, 6, 7


@cache
def tiny_engine(module: Literal["policy", "value"], dtype: str) -> FSDPEngine:
    """An engine around the random model; whoever trains on it clears the gradients (`clear_gradients`)."""
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = build_causal_lm(config, torch.float64 if dtype == "float64" else torch.float32, seed=0)
    engine = FSDPEngine(
        HFModelConfig(),
        FSDPEngineConfig(dtype=dtype),
        FSDPOptimizerConfig(),
        module=module,
        model=model if module == "policy" else model.model,
    )
    if module == "value":
        # A head of zeros would give the backbone no gradient.
        with torch.no_grad():
            engine.module.value_head.weight.copy_(torch.linspace(-1, 1, 16))  # type: ignore[union-attr, operator]
    return engine


def clear_gradients(engine: FSDPEngine) -> None:
    """Forgets what a backward has left."""
    for parameter in engine.module.parameters():
        parameter.grad = None


def tiny_rows(engine: FSDPEngine) -> DataProto:
    """Rows of ragged prompts and responses, with gaps of tool tokens, rejected tokens and a row that does not count."""
    rng = np.random.default_rng(0)
    shape = (_NUM_ROWS, _RESPONSE)
    prompt_mask = np.arange(_PROMPT) >= _PROMPT - rng.integers(1, _PROMPT + 1, size=(_NUM_ROWS, 1))
    present = np.arange(_RESPONSE) < rng.integers(2, _RESPONSE + 1, size=(_NUM_ROWS, 1))
    response_mask = present & ~((np.arange(_NUM_ROWS)[:, None] % 3 == 0) & (np.arange(_RESPONSE) == 1))
    loss_mask = response_mask & (rng.random(shape) > 0.1)
    loss_mask[2] = False
    attention_mask = np.concatenate([prompt_mask, present], axis=1)
    ids = np.where(attention_mask, rng.integers(3, _VOCAB, size=attention_mask.shape), 0)
    dtype = torch.float64 if engine.dtype == torch.float64 else torch.float32

    def noise(scale: float = 1.0) -> Tensor:
        return torch.from_numpy(scale * rng.normal(size=shape)).to(dtype)

    rows = DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "responses": torch.from_numpy(ids[:, _PROMPT:]),
            "response_mask": torch.from_numpy(response_mask),
            "loss_mask": torch.from_numpy(loss_mask),
            "advantages": noise(),
            "returns": noise(),
            "rollout_is_weights": noise(0.3).exp(),
            "choice_noise": torch.from_numpy(rng.random(shape)),
        }
    )
    if engine.kind == "policy":
        log_probs = engine.infer_batch(rows)["log_probs"]
        rows.tensors["old_log_probs"] = log_probs + noise(0.3)
        rows.tensors["ref_log_prob"] = log_probs + noise(0.3)
    else:
        rows.tensors["values"] = engine.infer_batch(rows, outputs=("values",))["values"] + noise(0.5)
    return rows
