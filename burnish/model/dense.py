"""The common dense families: Llama, Mistral, Qwen2 and Qwen3 are one computation with a few constants.

For each layer

    x = norm(h);  q, k, v = split(x W_qkv);  q, k = rotate(q_norm(q), k_norm(k));  h = h + attend(q, k, v) W_o
    x = norm(h);  g, u = split(x W_gate_up);                                       h = h + (silu(g) * u) W_down

Whoever computes this by itself, on the modules' parameters, finds here which modules do exactly that.
"""

from typing import Any, NamedTuple

from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3


class Family(NamedTuple):
    """Exact classes: a subclass may compute something else with modules of the same names."""

    causal_lm: type[nn.Module]
    backbone: type[nn.Module]
    layer: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


FAMILIES = (
    Family(
        llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP,
        llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding,
    ),
    Family(
        mistral.MistralForCausalLM, mistral.MistralModel, mistral.MistralDecoderLayer, mistral.MistralAttention,
        mistral.MistralMLP, mistral.MistralRMSNorm, mistral.MistralRotaryEmbedding,
    ),
    Family(
        qwen2.Qwen2ForCausalLM, qwen2.Qwen2Model, qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP,
        qwen2.Qwen2RMSNorm, qwen2.Qwen2RotaryEmbedding,
    ),
    Family(
        qwen3.Qwen3ForCausalLM, qwen3.Qwen3Model, qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen3.Qwen3MLP,
        qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding,
    ),
)  # fmt: skip

ACTIVATIONS = (nn.SiLU, SiLUActivation)

# No other activation is among them, nor an adapter's or a quantised layer.
PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList, *ACTIVATIONS)


class SameForward:
    """What stands in place of a module's ``forward`` and computes the same, such as a fused forward."""


class AttentionShape(NamedTuple):
    """The constants of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None

    @classmethod
    def of(cls, attention: Any) -> "AttentionShape":
        """Those of the attention module of one of the families."""
        head_dim = attention.head_dim
        num_heads, num_kv_heads = (p.out_features // head_dim for p in (attention.q_proj, attention.k_proj))
        return cls(num_heads, num_kv_heads, head_dim, attention.scaling, _sliding_window(attention))


def is_unchanged(module: nn.Module) -> bool:
    """Whether calling ``module`` computes what its class's forward does, and nothing else."""
    forward = vars(module).get("forward")
    return (forward is None or isinstance(forward, SameForward)) and not (
        module._forward_hooks or module._forward_pre_hooks
    )


def _sliding_window(attention: Any) -> int | None:
    """The window that the module passes to the attention function."""
    if type(attention) is llama.LlamaAttention:
        return None
    if type(attention) is mistral.MistralAttention:
        return getattr(attention.config, "sliding_window", None)
    window: int | None = attention.sliding_window
    return window
