"""The language-model head, fused with what is wanted of its logits, so that no full [tokens, vocab] tensor ever lives.

Log-probs, entropy and the sum of squared probabilities are functions of softmax(z), z = logits / temperature. They are
computed chunk by chunk in float32; the backward recomputes a chunk's logits and applies the closed-form gradients

    d log p_y / dz_j = [j = y] - p_j
    d H / dz_j       = -p_j (log p_j + H),              H = -sum_j p_j log p_j
    d S / dz_j       = 2 p_j (p_j - S),                 S = sum_j p_j^2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from burnish.model.linear import inference_linear

HEAD_OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")

# Elements of one chunk of float32 logits: 64 MiB on a CPU (near its caches), 1 GiB on a GPU (few large products).
_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}


@dataclass(frozen=True)
class LogitTransform:
    """What a model family does to ``hidden @ weight.T``: ``softcap * tanh(scale * x / softcap)``, or ``scale * x``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits as the family defines them; same shape and dtype, in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the raw product from that of ``self(raw) = logits``; overwrites both arguments."""
        if self.softcap is not None:
            grad = grad.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Soft-cap (Gemma), division (Granite) and scale (Cohere) of the logits, as the model's configuration has them."""
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
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
        logits = _matmul(hidden, weight.t())
    else:
        logits = inference_linear(hidden, weight, prepacked=prepacked).to(_wide(hidden))
    if bias is not None:
        logits = logits.add_(bias)
    return transform(logits)


def fused_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """What softmax(logits / temperature) gives each token, differentiable in hidden, weight and bias.

    Args:
        hidden: [tokens, hidden], the states that predict ``labels``.
        weight: [vocab, hidden].
        labels: [tokens] int64.
        outputs: of ``log_probs`` (of the label), ``entropy`` and ``sum_pi_squared``.
        chunk_size: tokens whose logits exist at once; chosen from the vocabulary when None.

    Returns:
        each output, [tokens], float32 (float64 for float64 states).
    """
    if chunk_size is None:
        elements = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cpu"])
        chunk_size = max(16, elements // weight.shape[0])
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
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            z = head_logits(hidden[rows], weight, bias, transform).mul_(inverse_temperature)
            log_normalizer = z.logsumexp(-1)
            log_probs = z.gather(1, labels[rows, None])[:, 0] - log_normalizer
            entropy = sum_squared = log_probs
            if want_entropy or want_sum_squared:
                all_log_probs = z.sub_(log_normalizer[:, None])
                probs = all_log_probs.exp()
                sum_squared = probs.square().sum(-1) if want_sum_squared else log_probs
                entropy = -(probs.mul_(all_log_probs)).sum(-1) if want_entropy else log_probs
            parts.append((log_normalizer, log_probs, entropy, sum_squared))
        if not parts:
            empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
            parts = [(empty, empty, empty, empty)]
        log_normalizer, log_probs, entropy, sum_squared = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, log_normalizer, entropy, sum_squared)
        ctx.settings = (transform, inverse_temperature, chunk_size)
        # An output that is only logged, as the entropy mostly is, costs nothing in the backward.
        ctx.set_materialize_grads(False)
        return log_probs, entropy if want_entropy else None, sum_squared if want_sum_squared else None

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, grad_sum_squared: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, bias, labels, log_normalizer, entropy, sum_squared = ctx.saved_tensors
        transform, inverse_temperature, chunk_size = ctx.settings
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # The products of all chunks add up in float32, also where weight is bf16.
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = head_logits(hidden[rows], weight, bias, transform)
            all_log_probs = logits.mul(inverse_temperature).sub_(log_normalizer[rows, None])
            probs = all_log_probs.exp()
            grad = torch.zeros_like(probs)
            if grad_log_probs is not None:
                grad.sub_(probs * grad_log_probs[rows, None])
                grad.scatter_add_(1, labels[rows, None], grad_log_probs[rows, None])
            if grad_sum_squared is not None:
                grad.add_((probs - sum_squared[rows, None]).mul_(probs).mul_(2.0 * grad_sum_squared[rows, None]))
            if grad_entropy is not None:
                grad.sub_(all_log_probs.add_(entropy[rows, None]).mul_(probs).mul_(grad_entropy[rows, None]))
            grad = transform.backward_(grad.mul_(inverse_temperature), logits)
            if bias is not None:
                grad_bias = grad.sum(0) if grad_bias is None else grad_bias.add_(grad.sum(0))
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if ctx.needs_input_grad[1]:
                product = _matmul(grad.t(), hidden[rows])
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def _wide(a: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(a.dtype, torch.float32)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in at least float32."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.dtype in (torch.bfloat16, torch.float16):
        return (a @ b).float()
    return a @ b


def value_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Values [tokens] in at least float32 of hidden states [tokens, hidden], weight [1, hidden] and bias [1]."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype))[:, 0]
