"""A model that was found, loaded on the CPU: whole, from its base and adapters, or from verl's shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.actor_rollout_ref import HFModelConfig
from burnish.engine.checkpoint.model_files import VALUE_HEAD_FILE
from burnish.model import lora
from burnish.model.load import load_backbone, load_causal_lm, load_config
from burnish.model.verl_shards import VerlWeights, as_value_function
from burnish.render import load_tokenizer
from burnish.trainer.offline.source import ModelSource
from burnish.utils import hub
from burnish.utils.errors import ModelError

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip
"""By the names that options have for them."""


def stored_dtype(source: ModelSource, *, trust_remote_code: bool = False) -> torch.dtype:
    """The dtype that the model's ``config.json`` says its weights have; float32 where it says none."""
    hub.check_model(source.model_path)
    config = load_config(source.model_path, trust_remote_code=trust_remote_code)
    return _as_dtype(getattr(config, "dtype", None)) or torch.float32


def load_model(
    source: ModelSource, dtype: torch.dtype, *, trust_remote_code: bool = False, attn: bool = True
) -> PreTrainedModel:
    """The causal LM, or of a critic the backbone, on the CPU in ``dtype``; adapters are in their places, not merged.

    Args:
        attn: False leaves transformers' own attention in place.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: peft is not installed, and there are adapters.
    """
    hub.check_model(source.model_path)
    load = load_backbone if source.role == "critic" else load_causal_lm
    model = load(
        source.model_path, dtype, trust_remote_code=trust_remote_code, override_config=source.override_config, attn=attn
    )
    if source.kind == "adapters":
        lora.add_adapters(model, HFModelConfig(lora_adapter_path=source.folder), source.base)
    return model


def load_value_head(source: ModelSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weight and bias of a critic's value head, by their names in its file.

    Raises:
        ModelError: there is none.
    """
    file = Path(source.folder) / VALUE_HEAD_FILE
    if source.kind == "verl":
        weights = as_value_function(VerlWeights(Path(source.folder)))
        head = {name: tensor for name, tensor in weights.items() if name.startswith("value_head.")}
    else:
        head = load_file(file) if file.is_file() else {}
    if "value_head.weight" not in head:
        raise ModelError(f"{source.shown} has no {VALUE_HEAD_FILE}: it is no critic.")
    return {name: tensor.to(dtype).contiguous() for name, tensor in head.items()}


def load_source_tokenizer(
    source: ModelSource, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelError: it has none, or none that can be loaded.
    """
    if source.tokenizer is None:
        raise ModelError(f"{source.shown} has no tokenizer beside it. Save one there with tokenizer.save_pretrained.")
    return load_tokenizer(source.tokenizer, trust_remote_code, chat_template)


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with its adapters added to the weights beside them, in place; the sum is made in at least float32."""
    dtype = model.dtype
    for name, layer in list(lora.adapter_layers(model)):
        plain = layer.base_layer
        a, b, _ = lora.low_rank(layer)
        plain.weight = torch.nn.Parameter(lora.merged_weight(layer, plain.weight, a, b).to(dtype), requires_grad=False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    if hasattr(model, "peft_config"):
        del model.peft_config
    # What transformers asks before it saves a model.
    model._hf_peft_config_loaded = False
    return model


def _as_dtype(value: Any) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) else None
