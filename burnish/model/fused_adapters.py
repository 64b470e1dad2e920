"""The fused blocks of `burnish.model.fused_layers` for a frozen model with adapters (LoRA).

    before  x = norm(h);            q, k, v = rotate(x W_qkv + low_rank(x))
    after   h' = h + a W_o + ...;   out = h' + (silu(g) * u) W_down + ...,   g, u = split(norm(h') W_gate_up + ...)

Norms, rotation and gate are one kernel each with its backward written out, products of one input are one product, and so are the
first products of its adapters. The rest is left to autograd, which spends nothing on weights that are not trained. What the
adapters multiply has to be kept, so that a block keeps more than without them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from burnish.model.dense import ACTIVATIONS, FAMILIES, AttentionShape, is_unchanged
from burnish.model.fused_layers import FusedBlock
from burnish.model.kernels import (
    HeadNorms,
    rms_norm,
    rms_norm_backward,
    rotate,
    rotate_backward,
    silu_mul,
    silu_mul_backward,
)
from burnish.model.linear import inference_linear
from burnish.model.lora import base_layer, is_plain_adapter, low_rank
from burnish.model.projections import GATE_UP, QKV, joint

_FAMILY_OF_LAYER = {family.layer: family for family in FAMILIES}


def fuse_adapters(model: nn.Module) -> bool:
    """Gives the blocks of ``model`` that have plain adapters the fused forward, without copying anything.

    Only blocks of a known family, unchanged but for the adapters. A call of a block whose own weights are trained, and any other
    that this was not made for, takes the forward of the block's class.

    Returns:
        whether all its blocks have it now.
    """
    blocks = [module for module in model.modules() if type(module) in _FAMILY_OF_LAYER]
    for block in blocks:
        if _is_known(block):
            block.forward = AdapterBlock(block)
    return bool(blocks) and all(isinstance(vars(block).get("forward"), AdapterBlock) for block in blocks)


class AdapterBlock(FusedBlock):
    """The forward of one block with adapters."""

    can_keep_product = False

    def activation_bytes(self, *, recompute_mlp: bool) -> int:
        """What is kept of each token."""
        attention, mlp = self.block.self_attn, self.block.mlp
        element = attention.q_proj.weight.element_size()
        kept = 2 * attention.q_proj.in_features  # Normed states, for the adapters.
        if not recompute_mlp:
            kept += mlp.down_proj.in_features
        return super().activation_bytes(recompute_mlp=recompute_mlp) + element * kept

    def _serves(self, hidden: Tensor, cos: Tensor, context: Any, kwargs: dict[str, Any]) -> bool:
        is_frozen = not any(
            parameter.requires_grad
            for layer in self._layers()
            for parameter in base_layer(layer).parameters(recurse=False)
        )
        return is_frozen and super()._serves(hidden, cos, context, kwargs)

    def _layers(self) -> list[Any]:
        attention, mlp = self.block.self_attn, self.block.mlp
        names = ((attention, (*QKV, "o_proj")), (mlp, (*GATE_UP, "down_proj")))
        return [getattr(module, name) for module, parts in names for name in parts]

    def _run(self, hidden_states: Tensor, *, angles: tuple[Tensor, Tensor], context: Any) -> Tensor:
        block, shape = self.block, self.shape
        q, k, v, o, *_ = self._layers()
        before, after = block.input_layernorm, block.post_attention_layernorm
        normed, residual = _AddNorm.apply(None, hidden_states.flatten(0, 1), before.weight, before.variance_epsilon)
        q_norm, k_norm = getattr(block.self_attn, "q_norm", None), getattr(block.self_attn, "k_norm", None)
        query, key, value = _Rotate.apply(
            shape,
            0.0 if q_norm is None else q_norm.variance_epsilon,
            _adapted(normed, (q, k, v)),
            angles[0][0].contiguous(),
            angles[1][0].contiguous(),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
        )
        attended = context.attend_tokens(
            query, key, value, scaling=shape.scaling, sliding_window=shape.sliding_window, softcap=None
        )
        normed, residual = _AddNorm.apply(
            _adapted(attended.flatten(1), (o,)), residual, after.weight, after.variance_epsilon
        )
        if self.recomputes_mlp and torch.is_grad_enabled():
            out = residual + checkpoint(self._mlp, normed, use_reentrant=False)
        else:
            out = residual + self._mlp(normed)
        # Not marked as a view: FSDP2 hooks what a block returns, and warns of views, on which hooks can be lost.
        row: Tensor = torch.ops.aten._unsafe_view(out, (1, *out.shape))
        return row

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up, down = self._layers()[4:]
        return _adapted(_SiluMul.apply(_adapted(x, (gate, up))), (down,))


def _adapted(x: Tensor, layers: Sequence[Any]) -> Tensor:
    """The outputs of the layers, with their adapters, of ``x`` [tokens, in] behind each other."""
    bases = [base_layer(layer) for layer in layers]
    out = _Frozen.apply(x, *(base.weight for base in bases), *(base.bias for base in bases))
    adapters = {
        place: low_rank(layer)
        for place, layer in enumerate(layers)
        if is_plain_adapter(layer) and not layer.disable_adapters
    }
    if not adapters:
        return out
    downs = [down for down, _, _ in adapters.values()]
    low = F.linear(x, torch.cat(downs) if len(downs) > 1 else downs[0]).split([len(down) for down in downs], dim=-1)
    deltas = {
        place: F.linear(part, up) * scaling
        for (place, (_, up, scaling)), part in zip(adapters.items(), low, strict=True)
    }
    if len(deltas) == len(layers):
        return out + (torch.cat(list(deltas.values()), dim=-1) if len(deltas) > 1 else deltas[0])
    parts = out.split([base.weight.shape[0] for base in bases], dim=-1)
    return torch.cat([part + deltas[place] if place in deltas else part for place, part in enumerate(parts)], dim=-1)


def _is_known(block: Any) -> bool:
    """Whether the block computes what its family does plus plain adapters, some of which there are."""
    if "forward" in vars(block):
        return False
    family, attention, mlp = _FAMILY_OF_LAYER[type(block)], block.self_attn, block.mlp
    layers = [getattr(attention, name) for name in (*QKV, "o_proj")]
    layers += [getattr(mlp, name) for name in (*GATE_UP, "down_proj")]
    adapters = [layer for layer in layers if is_plain_adapter(layer)]
    if not adapters or any(type(base_layer(layer)) is not nn.Linear for layer in layers):
        return False
    for group in (layers[:3], layers[4:6]):
        if len({base_layer(layer).bias is None for layer in group}) > 1:
            return False
    expected = {attention: (family.attention,), mlp: (family.mlp,), mlp.act_fn: ACTIVATIONS}
    norms = (block.input_layernorm, block.post_attention_layernorm)
    head_norms = tuple(getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name))
    expected |= dict.fromkeys((*norms, *head_norms), (family.norm,))
    of_layers = {id(part) for layer in layers for part in layer.modules()}
    others = [module for module in list(block.modules())[1:] if id(module) not in of_layers]
    return all(type(module) in expected.get(module, ()) for module in others) and all(
        is_unchanged(module) for module in list(block.modules())[1:]
    )


class _Frozen(torch.autograd.Function):
    """The outputs of frozen projections of ``x`` [tokens, in] behind each other; of their weights, then their biases.

    It keeps the weights for the backward, where autograd would keep the copy that joins those that do not lie behind each other:
    the model a second time, and whole where it is sharded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *projections: Tensor | None) -> Tensor:
        weights, biases = projections[: len(projections) // 2], projections[len(projections) // 2 :]
        ctx.save_for_backward(*weights)
        return inference_linear(x, joint(weights), joint(biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights = ctx.saved_tensors
        return inference_linear(grad, joint(weights).t()), *[None] * (2 * len(weights))


class _AddNorm(torch.autograd.Function):
    """x and the residual stream [tokens, hidden] -> the norm of their sum, and the sum; no x is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed = rms_norm(residual, weight, eps) if x is None else rms_norm(x, weight, eps, residual)
        ctx.has_x = x is not None
        ctx.save_for_backward(normed.summed, normed.rstd, weight)
        return normed.out, residual if x is None else normed.summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_summed: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        summed, rstd, weight = ctx.saved_tensors
        grad_both, grad_weight, _ = rms_norm_backward(grad.contiguous(), summed, rstd, weight, grad_summed.contiguous())
        needed = grad_weight.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_both if ctx.has_x else None, grad_both, needed, None


class _Rotate(torch.autograd.Function):
    """Projections [tokens, sum of heads * head_dim] -> query, key, value [tokens, heads, head_dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: AttentionShape,
        eps: float,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        norms = None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, eps)
        ctx.eps = eps
        ctx.save_for_backward(cos, sin, None if norms is None else qkv, q_norm, k_norm)
        return rotate(qkv, cos, sin, shape.num_heads, shape.num_kv_heads, norms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin, qkv, q_norm, k_norm = ctx.saved_tensors
        norms = None if qkv is None else HeadNorms(q_norm, k_norm, ctx.eps)
        grad_qkv, grad_norms = rotate_backward(grads, cos, sin, qkv, norms)  # type: ignore[arg-type]
        of_norms = (None, None) if grad_norms is None else grad_norms
        needed = [
            grad.to(q_norm.dtype) if grad is not None and needs else None
            for grad, needs in zip(of_norms, ctx.needs_input_grad[5:], strict=True)
        ]
        return None, None, grad_qkv, None, None, *needed


class _SiluMul(torch.autograd.Function):
    """Gate and up projections [tokens, 2 * intermediate] -> ``silu(gate) * up``."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        # The kernel overwrites what it is given, and autograd may have given this gradient to others as well.
        return silu_mul_backward(grad.clone(memory_format=torch.contiguous_format), gate_up)
