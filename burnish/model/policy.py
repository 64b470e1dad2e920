"""The two modules an engine trains: a policy (backbone and language-model head) and a value function."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.model.head import HEAD_OUTPUTS, fused_head, logit_transform, value_head
from burnish.model.packing import Packed, unpack_response
from burnish.utils.errors import ModelError


def effective_temperature(temperature: float) -> float:
    """The T of softmax(logits / T): greedy decoding (temperature 0) is scored under T = 1.

    Raises:
        ValueError: the temperature is negative or no number.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"The temperature must be a number of at least 0; got {temperature}.")
    return float(temperature) or 1.0


class PolicyModule(nn.Module):
    """A causal LM that gives log-probs instead of logits.

    It owns backbone and head, so that the head's weight is only read inside its forward: in the sharded layout that is
    where the weight is whole. A tied head and embedding are one parameter here as in the model.

    Args:
        model: a causal LM from `burnish.model.load`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__} has no language-model head, which a policy needs.")
        self.model = model
        self.transform = logit_transform(model.config)

    def forward(
        self, packed: Packed, temperature: float = 1.0, outputs: Sequence[str] = ("log_probs",)
    ) -> dict[str, Tensor]:
        """Each of ``outputs`` as [batch, response] float32, zero outside the labels."""
        unknown = set(outputs) - set(HEAD_OUTPUTS)
        if unknown:
            raise ValueError(f"A policy gives {', '.join(HEAD_OUTPUTS)}; asked for {', '.join(sorted(unknown))}.")
        hidden = _hidden_states(backbone_of(self.model), packed)
        head = self.model.get_output_embeddings()
        values = fused_head(
            packed.label_states(hidden),
            head.weight,
            packed.labels,
            bias=getattr(head, "bias", None),
            transform=self.transform,
            temperature=effective_temperature(temperature),
            outputs=outputs,
        )
        return {name: unpack_response(value, packed) for name, value in values.items()}


class ValueModule(nn.Module):
    """A backbone with one output per token: the value of the state before each response token.

    The head starts at zero, so values start at zero whatever the backbone is, and no random numbers are drawn.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        dtype = next(model.parameters()).dtype
        # The layer draws what is then zero.
        with torch.random.fork_rng(devices=[]):
            self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, packed: Packed, temperature: float = 1.0, outputs: Sequence[str] = ("values",)
    ) -> dict[str, Tensor]:
        """``values`` as [batch, response] float32, zero outside the labels; the temperature does not matter."""
        hidden = packed.label_states(_hidden_states(self.model, packed))
        return {"values": unpack_response(value_head(hidden, self.value_head.weight, self.value_head.bias), packed)}


def classifier_module(model: PreTrainedModel) -> ValueModule:
    """The backbone of a sequence classifier with one label, and its head as the value head: the value after a token is the
    score of the text that ends there.

    Raises:
        ModelError: its head is no linear layer.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{type(model).__name__} cannot be a reward model: its head is {type(head).__name__}, where one linear layer with "
            f"one output, called score, is expected."
        )
    module = ValueModule(cast(PreTrainedModel, model.base_model))
    with torch.no_grad():
        module.value_head.weight.copy_(head.weight)
        if head.bias is not None:
            module.value_head.bias.copy_(head.bias)
    return module


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The causal LM without its head: what gives the last hidden state."""
    # base_model alone is not enough: OPT wraps its decoder in another module that the causal LM goes around.
    return model.get_decoder()


def transformer_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the model, in order: the units of sharding and of activation checkpointing.

    Raises:
        ModelError: the model does not say which of its modules those are.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} does not name its blocks (_no_split_modules), so it cannot be sharded."
        )
    return blocks


def _hidden_states(backbone: Any, packed: Packed) -> Tensor:
    """Last hidden states of the packed row, [tokens, hidden]."""
    output = backbone(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        attention_context=packed.context,
    )
    return output[0][0]


def set_dtype(module: nn.Module, dtype: torch.dtype, *, trained: bool | None = None) -> None:
    """Casts parameters and leaves buffers: rotary frequencies lose their meaning in bf16.

    Args:
        trained: casts only those that require a gradient (True) or require none (False); None casts all.
    """
    for parameter in module.parameters():
        if trained is None or parameter.requires_grad == trained:
            parameter.data = parameter.data.to(dtype)
