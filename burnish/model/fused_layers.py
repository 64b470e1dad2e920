"""The transformer blocks of the common dense families, forward and backward written out.

A block is two differentiable functions with attention between them, whatever attends:

    before  x = norm(h);          q, k, v = rotate(x W_qkv)
    after   h' = h + a W_o;       out = h' + (silu(g) * u) W_down   with  g, u = split(norm(h') W_gate_up)

Products of one input are one product, everything elementwise between two products is one kernel, and the gradient of the
residual stream is added inside the norms' backward. Kept for the backward are the two states of the residual stream, what
attention keeps, and ``g, u``, the rest is a by-product of kernels that run anyway: the backward of the gate gives
``silu(g) * u`` once more, and that of a norm its output. Where memory is left over ``silu(g) * u`` is kept too, as writing it
again is a sixth of what that backward moves.

`fuse_layers` sets this as the ``forward`` of the Hugging Face blocks. They stay modules with the same parameters, which are
read at the call, so sharding, checkpointing and hooks wrap them as before. It rounds where the Hugging Face modules round, so
that the policy that is trained is the one that samples.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from burnish.model.dense import ACTIVATIONS, FAMILIES, AttentionShape, SameForward, is_unchanged
from burnish.model.kernels import (
    HeadNorms,
    rms_norm,
    rms_norm_backward,
    rotate,
    rotate_backward,
    silu_mul,
    silu_mul_backward,
)
from burnish.model.kernels.cpu import layers as compiled
from burnish.model.linear import inference_linear
from burnish.model.projections import GATE_UP, QKV, joint

_FAMILY_OF_LAYER = {family.layer: family for family in FAMILIES}
_FAMILY_OF_BACKBONE = {family.backbone: family for family in FAMILIES}
# Some versions of transformers checkpoint around a layer's call, which finds any forward, and some inside its forward.
_CALL_CHECKPOINTS = "__call__" in vars(GradientCheckpointingLayer)


def fuse_layers(model: nn.Module) -> bool:
    """Gives the blocks of ``model``, and the norm after them, the fused forward; once, and without copying anything.

    Only blocks that compute exactly what is written here: a known family, unchanged, without adapters. Whatever wraps the
    forward of a block, as `burnish.model.activations` does, comes afterwards.

    Returns:
        whether all blocks of the model are fused now.
    """
    fused = [_fuse_block(module) for module in model.modules() if type(module) in _FAMILY_OF_LAYER]
    for module in model.modules():
        family = _FAMILY_OF_BACKBONE.get(type(module))
        norm: Any = getattr(module, "norm", None)
        if family is not None and type(norm) is family.norm and is_unchanged(norm):
            norm.forward = FusedNorm(norm)
    return bool(fused) and all(fused)


def fuse_where_it_pays(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    """`fuse_layers`, if the fused blocks of ``model`` are the faster ones on ``device``, where it will compute in ``dtype``.

    That is everywhere but on a CPU in half precision without compiled kernels, as plain torch's passes over memory are more
    than Hugging Face's.
    """
    if device.type == "cpu":
        compiled.prepare(model.config.get_text_config().hidden_size)
        if dtype.itemsize < 4 and not compiled.has_kernels(dtype):
            return False
    return fuse_layers(model)


def fused_blocks(model: nn.Module) -> list["FusedBlock"]:
    """The fused forwards of the blocks of ``model``, in order."""
    forwards = map(_innermost, model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedBlock)]


def recompute_mlp(model: nn.Module, recompute: bool = True) -> None:
    """Whether the fused blocks keep the gate and up projections, or compute them again in the backward.

    That is the larger part of what a block keeps, for one of its products: a sixth of the time of forward and backward,
    where recomputing the whole block takes a third.
    """
    for block in fused_blocks(model):
        block.recomputes_mlp = recompute


def activation_bytes_per_token(model: nn.Module, *, recompute_mlp: bool = False) -> int:
    """Memory that the fused blocks of ``model`` keep of each token until the backward; 0 where none is fused.

    Attention is counted as a flash kernel keeps it: queries, keys, values, output and one float32 per head.
    """
    return sum(block.activation_bytes(recompute_mlp=recompute_mlp) for block in fused_blocks(model))


class FusedBlock(SameForward):
    """The forward of one block; where it was not made for a call, the forward of the block's class."""

    can_keep_product = True
    """Whether `keeps_product` means anything."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.shape = AttentionShape.of(block.self_attn)
        self._inside = list(block.modules())[1:]
        self.recomputes_mlp = False
        """Whether the backward computes the gate and up projections again."""
        self.keeps_product = False
        """Whether the forward keeps ``silu(g) * u``, which the backward can have again for a little time."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's output, [1, tokens, hidden] like ``hidden_states``."""
        block = self.block
        context, angles = kwargs.get("attention_context"), kwargs.get("position_embeddings")
        if args or angles is None or not self._serves(hidden_states, angles[0], context, kwargs):
            return type(block).forward(block, hidden_states, *args, **kwargs)
        run = partial(self._run, angles=angles, context=context)
        if not _CALL_CHECKPOINTS and block.gradient_checkpointing and block.training and torch.is_grad_enabled():
            return block._gradient_checkpointing_func(run, hidden_states)
        return run(hidden_states)

    def activation_bytes(self, *, recompute_mlp: bool) -> int:
        """What is kept of each token."""
        shape, attention, mlp = self.shape, self.block.self_attn, self.block.mlp
        element = attention.q_proj.weight.element_size()
        turned, values = (shape.num_heads + shape.num_kv_heads) * shape.head_dim, shape.num_kv_heads * shape.head_dim
        kept = 2 * attention.q_proj.in_features + turned + values + shape.num_heads * shape.head_dim
        if hasattr(attention, "q_norm"):
            kept += turned  # Before their norms.
        if not recompute_mlp:
            kept += 2 * mlp.gate_proj.out_features
        return element * kept + 4 * (2 + shape.num_heads)

    def _serves(self, hidden: Tensor, cos: Tensor, context: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this is a call in training: one packed row, a context that attends to tokens, no cache of transformers."""
        return (
            hasattr(context, "attend_tokens")
            and hidden.dim() == 3
            and hidden.shape[0] == cos.shape[0] == 1
            and cos.shape[-1] == self.shape.head_dim
            and hidden.dtype == cos.dtype == self.block.mlp.gate_proj.weight.dtype
            and kwargs.get("cache") is None
            and kwargs.get("past_key_values") is None
            # Whoever hooks a module inside since then wants it to be called.
            and all(is_unchanged(module) for module in self._inside)
        )

    def _run(self, hidden_states: Tensor, *, angles: tuple[Tensor, Tensor], context: Any) -> Tensor:
        block, shape = self.block, self.shape
        attention, mlp = block.self_attn, block.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        qkv = [getattr(attention, name) for name in QKV]
        gate_up = [getattr(mlp, name) for name in GATE_UP]
        query, key, value, residual = _BeforeAttention.apply(
            _Before(shape, block.input_layernorm.variance_epsilon, 0.0 if q_norm is None else q_norm.variance_epsilon),
            hidden_states.flatten(0, 1),
            angles[0][0].contiguous(),
            angles[1][0].contiguous(),
            block.input_layernorm.weight,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            *(projection.weight for projection in qkv),
            *(projection.bias for projection in qkv),
        )
        attended = context.attend_tokens(
            query, key, value, scaling=shape.scaling, sliding_window=shape.sliding_window, softcap=None
        )
        out = _AfterAttention.apply(
            _After(block.post_attention_layernorm.variance_epsilon, self.recomputes_mlp, self.keeps_product),
            attended.flatten(1),
            residual,
            block.post_attention_layernorm.weight,
            *(projection.weight for projection in (attention.o_proj, *gate_up, mlp.down_proj)),
            *(projection.bias for projection in (attention.o_proj, *gate_up, mlp.down_proj)),
        )
        # Not marked as a view: FSDP2 hooks what a block returns, and warns of views, on which hooks can be lost.
        row: Tensor = torch.ops.aten._unsafe_view(out, (1, *out.shape))
        return row


class FusedNorm(SameForward):
    """The forward of one RMS norm."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """The normed states, of the shape of ``hidden_states``."""
        norm = self.norm
        if hidden_states.dtype != norm.weight.dtype:
            out: Tensor = type(norm).forward(norm, hidden_states)
            return out
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _Norm.apply(flat, norm.weight, norm.variance_epsilon).view(hidden_states.shape)


def _innermost(module: nn.Module) -> Any:
    """What stands in place of the forward of ``module``, or what that wraps; None is nothing."""
    forward = vars(module).get("forward")
    while isinstance(forward, SameForward) and not isinstance(forward, FusedBlock):
        forward = getattr(forward, "forward", None)
    return forward


def _fuse_block(block: Any) -> bool:
    """Sets the fused forward, if this is the block that it computes. Returns whether it has it."""
    if isinstance(_innermost(block), FusedBlock):
        return True
    family = _FAMILY_OF_LAYER[type(block)]
    attention, mlp = block.self_attn, block.mlp
    expected = {
        attention: (family.attention,),
        mlp: (family.mlp,),
        mlp.act_fn: ACTIVATIONS,
        **dict.fromkeys((block.input_layernorm, block.post_attention_layernorm), (family.norm,)),
        **dict.fromkeys((getattr(attention, name) for name in (*QKV, "o_proj")), (nn.Linear,)),
        **dict.fromkeys((getattr(mlp, name) for name in (*GATE_UP, "down_proj")), (nn.Linear,)),
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            expected[getattr(attention, name)] = (family.norm,)
    # All modules, so that nothing that was added to the block is passed over.
    inner = list(block.modules())[1:]
    if any(type(module) not in expected.get(module, ()) or not is_unchanged(module) for module in inner):
        return False
    if "forward" in vars(block) or not (_alike_biases(attention, QKV) and _alike_biases(mlp, GATE_UP)):
        return False
    block.forward = FusedBlock(block)
    return True


def _alike_biases(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether all of these projections have a bias, or none."""
    return len({getattr(module, name).bias is None for name in names}) == 1


class _Before(NamedTuple):
    """The constants of `_BeforeAttention`."""

    shape: AttentionShape
    eps: float
    head_eps: float


class _After(NamedTuple):
    """The constants of `_AfterAttention`."""

    eps: float
    recomputes_mlp: bool
    keeps_product: bool


class _BeforeAttention(torch.autograd.Function):
    """hidden [tokens, hidden] -> query, key, value [tokens, heads, head_dim], and hidden itself, for the residual stream.

    It returns its input so that the residual stream's gradient comes to its backward, which adds it on its way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        constants: _Before,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *projections: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = constants.shape
        weights, biases = projections[:3], projections[3:]
        normed = rms_norm(hidden, norm, constants.eps)
        qkv = inference_linear(normed.out, joint(weights), joint(biases))
        norms = _head_norms(q_norm, k_norm, constants)
        query, key, value = rotate(qkv, cos, sin, shape.num_heads, shape.num_kv_heads, norms)
        ctx.constants = constants
        ctx.save_for_backward(
            hidden, normed.rstd, None if norms is None else qkv, cos, sin, norm, q_norm, k_norm, *weights
        )
        ctx.set_materialize_grads(True)
        return query, key, value, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, rstd, qkv, cos, sin, norm, q_norm, k_norm, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[7:]
        *turned, grad_residual = grads
        norms = _head_norms(q_norm, k_norm, ctx.constants)
        grad_qkv, grad_head_norms = rotate_backward(tuple(turned), cos, sin, qkv, norms)  # type: ignore[arg-type]
        del turned
        grad_normed = inference_linear(grad_qkv, joint(weights).t())
        grad_hidden, grad_norm, normed = rms_norm_backward(
            grad_normed, hidden, rstd, norm, grad_residual.contiguous(), again=any(needs[:3])
        )
        del grad_normed
        grad_q_norm, grad_k_norm = (None, None) if grad_head_norms is None else grad_head_norms
        return (
            None,
            grad_hidden,
            None,
            None,
            _like(grad_norm, norm),
            _like(grad_q_norm, q_norm),
            _like(grad_k_norm, k_norm),
            *_weight_grads(grad_qkv, normed, weights, needs[:3]),
            *_bias_grads(grad_qkv, weights, needs[3:]),
        )


class _AfterAttention(torch.autograd.Function):
    """attended [tokens, heads * head_dim] and the residual stream [tokens, hidden] -> the block's output [tokens, hidden].

    Weights and biases are those of the output, gate, up and down projections.
    """

    @staticmethod
    def forward(
        ctx: Any,
        constants: _After,
        attended: Tensor,
        residual: Tensor,
        norm: Tensor,
        *projections: Tensor | None,
    ) -> Tensor:
        (w_out, *w_gate_up, w_down), (b_out, *b_gate_up, b_down) = projections[:4], projections[4:]
        normed = rms_norm(inference_linear(attended, w_out, b_out), norm, constants.eps, residual)  # type: ignore[arg-type]
        gate_up = inference_linear(normed.out, joint(w_gate_up), joint(b_gate_up))
        product = silu_mul(gate_up)
        out = inference_linear(product, w_down, b_down).add_(normed.summed)  # type: ignore[arg-type]
        ctx.constants = constants
        kept = (None if constants.recomputes_mlp else gate_up, product if constants.keeps_product else None)
        ctx.save_for_backward(attended, normed.summed, normed.rstd, *kept, norm, *projections[:4], *b_gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        attended, h, rstd, gate_up, product, norm, w_out, w_gate, w_up, w_down, *b_gate_up = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        grad = grad.contiguous()
        w_gate_up = joint((w_gate, w_up))
        if gate_up is None:
            gate_up = inference_linear(rms_norm(h, norm, ctx.constants.eps).out, w_gate_up, joint(b_gate_up))
        grad_product = inference_linear(grad, w_down.t())
        grad_gate_up = silu_mul_backward(grad_product, gate_up, again=product is None)
        if product is None:
            product = grad_product  # It was the gradient, now it is the product itself.
        grad_w_down = _weight_grads(grad, product, (w_down,), needs[3:4])
        del product, grad_product, gate_up
        grad_h, grad_norm, normed = rms_norm_backward(
            inference_linear(grad_gate_up, w_gate_up.t()), h, rstd, norm, grad, again=any(needs[1:3])
        )
        return (
            None,
            inference_linear(grad_h, w_out.t()) if ctx.needs_input_grad[1] else None,
            grad_h,
            _like(grad_norm, norm),
            *_weight_grads(grad_h, attended, (w_out,), needs[:1]),
            *_weight_grads(grad_gate_up, normed, (w_gate, w_up), needs[1:3]),
            *grad_w_down,
            *_bias_grads(grad_h, (w_out,), needs[4:5]),
            *_bias_grads(grad_gate_up, (w_gate, w_up), needs[5:7]),
            *_bias_grads(grad, (w_down,), needs[7:]),
        )


class _Norm(torch.autograd.Function):
    """RMS norm of [tokens, hidden]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = rms_norm(hidden, weight, eps)
        ctx.save_for_backward(hidden, normed.rstd, weight)
        return normed.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        hidden, rstd, weight = ctx.saved_tensors
        grad_hidden, grad_weight, _ = rms_norm_backward(grad.contiguous(), hidden, rstd, weight)
        return grad_hidden, _like(grad_weight, weight), None


def _head_norms(q_norm: Tensor | None, k_norm: Tensor | None, constants: _Before) -> HeadNorms | None:
    return None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, constants.head_eps)


def _weight_grads(
    grad: Tensor, x: Tensor | None, weights: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """``grad^T x`` [out, in] for the projections behind each other in ``grad`` [tokens, sum of out], by one product."""
    sizes = [weight.shape[0] for weight in weights]
    if all(needs):
        assert x is not None
        return list((grad.t() @ x).split(sizes))
    parts = zip(grad.split(sizes, 1), needs, strict=True)
    return [part.t() @ x if need else None for part, need in parts]  # type: ignore[operator]


def _bias_grads(grad: Tensor, weights: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The sums over tokens of ``grad`` [tokens, sum of out], for each projection; None where none is needed."""
    if not any(needs):
        return [None] * len(needs)
    parts = grad.sum(0).split([weight.shape[0] for weight in weights])
    return [part if need else None for part, need in zip(parts, needs, strict=True)]


def _like(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """The gradient of ``parameter``, in its dtype."""
    return None if grad is None or parameter is None else grad.to(parameter.dtype)
