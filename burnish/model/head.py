"""The language-model head, fused with what is wanted of its logits, so that no full [tokens, vocab] tensor ever lives.

Log-probs, entropy and the other outputs are functions of softmax(z), z = logits / temperature. They are computed chunk by
chunk in float32; the backward recomputes a chunk's logits, writes the closed-form gradient over them (the formulas are in
`burnish.model.kernels.head`) and multiplies it out. One buffer for the logits of a chunk serves a whole pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from burnish.model.head_chunks import Chunks, GradientSums, matmul, wide_dtype
from burnish.model.kernels.head import (
    LogitTransform,
    OutputGrads,
    Softmax,
    Statistics,
    head_gradient_,
    head_statistics,
    joins_product,
    kl_gradient_,
    kl_statistics,
    product_gradient,
    product_statistics,
)
from burnish.model.linear import inference_linear

HEAD_OUTPUTS = ("log_probs", "entropy", "sum_pi_squared", "top1_log_probs")


_PLAIN = LogitTransform()


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Soft-cap (Gemma), division (Granite) and scale (Cohere) of the logits, as the model's configuration has them."""
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = _PLAIN,
    *,
    prepacked: Tensor | None = None,
) -> Tensor:
    """Logits before temperature, [tokens, vocab] in at least float32; the one definition for training and rollout.

    On a GPU the product of bf16 operands is written in float32 directly; on a CPU it is rounded to bf16 first.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        prepacked: see `inference_linear`.
    """
    # Never differentiated: the fused head's backward is its own.
    if hidden.is_cuda:
        logits = matmul(hidden, weight.t())
    else:
        logits = inference_linear(hidden, weight, prepacked=prepacked).to(wide_dtype(hidden))
    if bias is not None:
        logits = logits.add_(bias)
    return transform(logits)


def fused_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = _PLAIN,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """What softmax(logits / temperature) gives each token, differentiable in hidden, weight and bias.

    Only outputs through which a gradient flows cost something in the backward.

    Args:
        hidden: [tokens, hidden], the states that predict ``labels``.
        weight: [vocab, hidden].
        labels: [tokens] int64.
        outputs: of ``log_probs`` (of the label), ``entropy``, ``sum_pi_squared`` and ``top1_log_probs`` (of the most likely
            token, without gradient; equal to ``log_probs`` where the label is that token).
        chunk_size: tokens whose logits exist at once; chosen from the vocabulary when None.

    Returns:
        each output, [tokens], float32 (float64 for float64 states).
    """
    values = _FusedHead.apply(
        hidden, weight, bias, labels, transform, 1.0 / temperature, "entropy" in outputs, "sum_pi_squared" in outputs, chunk_size
    )  # fmt: skip
    return {name: value for name, value in zip(HEAD_OUTPUTS, values, strict=True) if name in outputs}


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        inverse_temperature: float,
        want_entropy: bool,
        want_sum_squared: bool,
        chunk_size: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        softmax = Softmax(transform, inverse_temperature, bias)
        wanted = {"want_entropy": want_entropy, "want_sum_squared": want_sum_squared}
        if joins_product(hidden, weight):
            statistics = product_statistics(hidden, weight, labels, softmax, **wanted)
        else:
            chunks = Chunks(hidden, weight, chunk_size)
            parts = [head_statistics(chunks.product(rows), labels[rows], softmax, **wanted) for rows in chunks]
            statistics = _joined(parts) if parts else Statistics(*(_no_tokens(hidden) for _ in range(5)))
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, bias, labels, *statistics)
            ctx.settings = (transform, inverse_temperature, chunk_size)
        # An output that is only logged, as the entropy mostly is, costs nothing in the backward.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics.top1_log_probs)
        return (
            statistics.log_probs,
            statistics.entropy if want_entropy else None,
            statistics.sum_pi_squared if want_sum_squared else None,
            statistics.top1_log_probs,
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_sum_squared: Tensor | None,
        _grad_top1: Tensor | None,
    ) -> tuple[Any, ...]:
        hidden, weight, bias, labels, *statistics = ctx.saved_tensors
        transform, inverse_temperature, chunk_size = ctx.settings
        softmax = Softmax(transform, inverse_temperature, bias)
        joins = joins_product(hidden, weight)
        chunks = Chunks(hidden, weight, chunk_size, dtype=hidden.dtype if joins else None)
        sums = GradientSums(chunks, hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in chunks:
            grads = (_rows_of(grad, rows) for grad in (grad_log_probs, grad_entropy, grad_sum_squared))
            how = (
                labels[rows],
                softmax,
                Statistics(*(_rows_of(column, rows) for column in statistics)),
                OutputGrads(*grads),
            )
            if joins:
                sums.add(rows, product_gradient(hidden[rows], weight, *how, chunks.buffer(rows)))
            else:
                sums.add(rows, head_gradient_(chunks.product(rows), *how, hidden.dtype))
        return *sums.results(), *[None] * 6


def fused_kl(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    *,
    bias: Tensor | None = None,
    other_bias: Tensor | None = None,
    transform: LogitTransform = _PLAIN,
    other_transform: LogitTransform | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """KL(p || q) = sum_j p_j (log p_j - log q_j) over the whole vocabulary, of p from ``hidden`` and q from the others.

    Differentiable in hidden, weight and bias; the other policy is a constant.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        other_hidden: [tokens, other hidden], for the same tokens.
        other_weight: [vocab, other hidden].
        other_transform: ``transform`` when None.
        temperature: of both.
        chunk_size: tokens of which both logits exist at once; chosen from the vocabulary when None.

    Returns:
        [tokens], float32 (float64 for float64 states).

    Raises:
        ValueError: the two have other vocabularies, or other tokens.
    """
    if weight.shape[0] != other_weight.shape[0] or hidden.shape[0] != other_hidden.shape[0]:
        raise ValueError(
            f"A KL divergence compares two policies on the same tokens and vocabulary; the first has {hidden.shape[0]} "
            f"tokens and {weight.shape[0]} ids, the other {other_hidden.shape[0]} and {other_weight.shape[0]}."
        )
    inverse = 1.0 / temperature
    other = Softmax(transform if other_transform is None else other_transform, inverse, other_bias)
    kl: Tensor = _FusedKL.apply(
        hidden, weight, bias, other_hidden, other_weight, Softmax(transform, inverse, bias), other, chunk_size
    )
    return kl


class _FusedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        other_hidden: Tensor,
        other_weight: Tensor,
        softmax: Softmax,
        other_softmax: Softmax,
        chunk_size: int | None,
    ) -> Tensor:
        chunks, others = Chunks(hidden, weight, chunk_size, 2), Chunks(other_hidden, other_weight, chunk_size, 2)
        parts = [
            kl_statistics(chunks.product(rows), softmax, others.product(rows), other_softmax) for rows in chunks
        ] or [(_no_tokens(hidden),) * 3]
        statistics = [torch.cat(part) for part in zip(*parts, strict=True)]
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(hidden, weight, bias, other_hidden, other_weight, *statistics)
            ctx.settings = (softmax, other_softmax, chunk_size)
        return statistics[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, other_hidden, other_weight, *statistics = ctx.saved_tensors
        softmax, other_softmax, chunk_size = ctx.settings
        chunks, others = Chunks(hidden, weight, chunk_size, 2), Chunks(other_hidden, other_weight, chunk_size, 2)
        sums = GradientSums(chunks, hidden, weight, bias, ctx.needs_input_grad[:3])
        for rows in chunks:
            kl, normalizer, other_normalizer = (x[rows] for x in statistics)
            sums.add(
                rows,
                kl_gradient_(
                    chunks.product(rows),
                    softmax,
                    others.product(rows),
                    other_softmax,
                    (kl, normalizer, other_normalizer),
                    grad_kl[rows],
                    hidden.dtype,
                ),
            )
        return *sums.results(), *[None] * 5


def _joined(parts: Sequence[Statistics]) -> Statistics:
    """Those of all chunks behind each other."""
    return Statistics._make(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))


def _rows_of(column: Any, rows: slice) -> Any:
    return None if column is None else column[rows]


def _no_tokens(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(0, dtype=wide_dtype(hidden))


def value_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Values [tokens] in at least float32 of hidden states [tokens, hidden], weight [1, hidden] and bias [1]."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype))[:, 0]
