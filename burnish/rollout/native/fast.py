"""The forward of the common dense families as a short list of products and fused kernels, on the model's own weights.

What `burnish.model.dense` says they compute, with the module calls, hooks, mask building and reshapes around it left out. It
rounds where the Hugging Face modules round, so that the policy that samples is the one that is trained. Adapters (LoRA) stay
apart from the weights here too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from burnish.model.dense import FAMILIES, PLAIN_MODULES, AttentionShape, is_unchanged
from burnish.model.lora import is_plain_adapter
from burnish.model.projections import GATE_UP, QKV
from burnish.rollout.native.kernels import rms_norm, rotate_and_store, silu_mul
from burnish.rollout.native.paged_cache import PagedCache
from burnish.rollout.native.prepacked_linear import JointLinear

# Those whose angles depend on the position alone; the others change with the longest sequence of a call.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# On a CPU a prompt's tokens go through the MLP in parts that stay in a cache: memory of what its first products give, and
# tokens below which the products themselves get slower.
_MLP_BYTES = 1 << 22
_MIN_MLP_TOKENS = 256

_FAMILY_OF_MODEL = {family.causal_lm: family for family in FAMILIES}


class FastContext(Protocol):
    """How one call attends, and where its keys and values go."""

    cache: PagedCache
    places: Tensor
    """int64 [tokens], place of each token in the cache, block * block_size + offset."""

    def attend_packed(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention of one layer whose new keys and values are in the cache already.

        Args:
            query: [tokens, query_heads, head_dim], after rotary embedding; a view.
            key, value: [tokens, key_value_heads, head_dim], after rotary embedding; views.

        Returns:
            [tokens, query_heads * head_dim].
        """
        ...


class FastForward:
    """Last hidden states of a supported causal LM, from the parameters as they are at the call.

    Args:
        model: one that `supports` says yes to.
        max_length: positions are below it; None is the model's max_position_embeddings.
    """

    def __init__(self, model: PreTrainedModel, max_length: int | None = None) -> None:
        backbone: Any = model.get_decoder()
        self._embedding: nn.Embedding = backbone.embed_tokens
        self._layers = [_Layer(layer, index) for index, layer in enumerate(_used_layers(backbone))]
        self._norm = backbone.norm
        self._rotary = backbone.rotary_emb
        self._cos = self._sin = torch.empty(0)
        self.reserve(model.config.max_position_embeddings if max_length is None else max_length)

    @property
    def products(self) -> list[JointLinear]:
        """The products with weights in its layers."""
        return [product for layer in self._layers for product in layer.products]

    @classmethod
    def supports(cls, model: nn.Module) -> bool:
        """Whether ``model`` computes exactly what this class does: a known family, unchanged, with whole weights."""
        family = _FAMILY_OF_MODEL.get(type(model))
        if family is None:
            return False
        known = (*family, *PLAIN_MODULES)
        adapters = [module for module in model.modules() if is_plain_adapter(module)]
        of_adapters = {id(part) for adapter in adapters for part in adapter.modules() if part is not adapter.base_layer}
        if not all(type(module) in known or id(module) in of_adapters for module in model.modules()):
            return False
        if not all(is_unchanged(module) for module in model.modules()):
            return False
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return False
        backbone: Any = model.get_decoder()  # type: ignore[operator]
        return (
            len(_used_layers(backbone)) > 0
            and backbone.embed_tokens.max_norm is None
            and backbone.rotary_emb.rope_type in _STATIC_ROPE_TYPES
            and 2 * backbone.rotary_emb.inv_freq.shape[0] == backbone.layers[0].self_attn.head_dim
        )

    @torch.no_grad()
    def reserve(self, max_length: int) -> None:
        """Makes positions below ``max_length`` possible; the tables move, so graphs are captured afterwards."""
        if max_length <= self._cos.shape[0]:
            return
        weight = self._embedding.weight
        positions = torch.arange(max_length, device=weight.device)[None]
        # In the model's dtype first: the trained model rounds its angles' sines, and so must its rollout.
        cos, sin = self._rotary(weight[:1, None], positions)
        self._cos, self._sin = cos[0].float().contiguous(), sin[0].float().contiguous()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, positions: Tensor, context: FastContext) -> Tensor:
        """[tokens, hidden] after the final norm.

        Args:
            input_ids: int64 [tokens].
            positions: integers [tokens], of each token in its sequence.
        """
        x, residual, _ = self._run(input_ids, positions, context, self._layers)
        assert x is not None  # There is a layer.
        return rms_norm(x, self._norm.weight, self._norm.variance_epsilon, residual)[0]

    @torch.no_grad()
    def fill(self, input_ids: Tensor, positions: Tensor, context: FastContext) -> None:
        """As a call, for what it stores alone: the last layer does nothing beyond that."""
        *before, last = self._layers
        x, residual, angles = self._run(input_ids, positions, context, before)
        last.project(last.input_norm(x, residual)[0], angles, context)

    def _run(
        self, input_ids: Tensor, positions: Tensor, context: FastContext, layers: Sequence["_Layer"]
    ) -> tuple[Tensor | None, Tensor, "_Angles"]:
        """The last addition to the residual stream (None without a layer), the stream before it, and the angles."""
        residual = F.embedding(input_ids, self._embedding.weight)
        angles = _Angles(self._cos, self._sin, positions)
        if not residual.is_cuda:
            # Looked up once for all layers; a GPU kernel does it on its way.
            dtype = residual.dtype
            angles = _Angles(self._cos[positions].to(dtype), self._sin[positions].to(dtype), None)
        x: Tensor | None = None
        for layer in layers:
            normed, residual = layer.input_norm(x, residual)
            attended = layer.attend(*layer.project(normed, angles, context), context)
            normed, residual = layer.mlp_norm(attended, residual)
            x = layer.mlp(normed)
        return x, residual, angles


class _Angles(NamedTuple):
    """Cosines and sines [num_positions, head_dim], and which rows of them the tokens take; None: one row a token."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None


class _Layer:
    """The modules of one layer, of which only the parameters are used, and its constants."""

    def __init__(self, layer: Any, index: int) -> None:
        attention = layer.self_attn
        self._index = index
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        qkv = [getattr(attention, name) for name in QKV]
        self._qkv, self._out = JointLinear(qkv), JointLinear([attention.o_proj])
        gate_up = [getattr(layer.mlp, name) for name in GATE_UP]
        self._gate_up, self._down = JointLinear(gate_up), JointLinear([layer.mlp.down_proj])
        self.products = (self._qkv, self._out, self._gate_up, self._down)
        self._q_norm, self._k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._norm_eps = 0.0 if self._q_norm is None else self._q_norm.variance_epsilon
        self._shape = AttentionShape.of(attention)

    def input_norm(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual + x`` [tokens, hidden], normed and as it is; x is None before the first layer."""
        norm = self._input_norm
        if x is None:
            return rms_norm(residual, norm.weight, norm.variance_epsilon), residual
        return rms_norm(x, norm.weight, norm.variance_epsilon, residual)

    def mlp_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual + x`` [tokens, hidden], normed and as it is."""
        return rms_norm(x, self._mlp_norm.weight, self._mlp_norm.variance_epsilon, residual)

    def project(self, x: Tensor, angles: _Angles, context: FastContext) -> tuple[Tensor, Tensor, Tensor]:
        """Normed states [tokens, hidden] -> rotated queries, keys and values; the latter two are stored."""
        return rotate_and_store(
            self._qkv(x),
            angles.cos,
            angles.sin,
            angles.positions,
            context.cache,
            self._index,
            context.places,
            self._shape.num_heads,
            self._shape.num_kv_heads,
            None if self._q_norm is None else self._q_norm.weight,
            None if self._k_norm is None else self._k_norm.weight,
            self._norm_eps,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: FastContext) -> Tensor:
        """What `project` gives -> the attention block's addition to the residual stream, [tokens, hidden]."""
        attended = context.attend_packed(
            self._index, query, key, value, scaling=self._shape.scaling, sliding_window=self._shape.sliding_window
        )
        return self._out(attended)

    def mlp(self, x: Tensor) -> Tensor:
        """Normed states [tokens, hidden] -> the MLP's addition to the residual stream."""
        chunk = self._mlp_chunk(x)
        if x.shape[0] <= chunk:
            return self._down(silu_mul(self._gate_up(x)))
        return torch.cat([self._down(silu_mul(self._gate_up(part))) for part in x.split(chunk)])

    def _mlp_chunk(self, x: Tensor) -> int:
        """Tokens that go through the MLP at once: what is between its products is its largest tensor."""
        if x.is_cuda:
            return x.shape[0]
        fits = _MLP_BYTES // (self._gate_up.out_features * x.element_size())
        return max(_MIN_MLP_TOKENS, fits)


def _used_layers(backbone: Any) -> list[nn.Module]:
    """As the backbone's forward does: a configuration may use only the first of its layers."""
    return list(backbone.layers[: backbone.config.num_hidden_layers])
