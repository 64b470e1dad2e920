"""What softmax(z) gives each token and its gradient, from a chunk of logits: in Triton on a GPU, in C++ on a CPU, or in torch.

``raw`` [tokens, vocab] is the product ``hidden @ weight.T``, and z = transform(raw + bias) / temperature. The functions
overwrite it: the gradient lies where the logits lay, so that one chunk of logits is all that lives. All arithmetic is in at
least float32.

    d log p_y / dz_j = [j = y] - p_j
    d H / dz_j       = -p_j (log p_j + H),              H = -sum_j p_j log p_j
    d S / dz_j       = 2 p_j (p_j - S),                 S = sum_j p_j^2
    d KL / dz_j      = p_j (log p_j - log q_j - KL),    KL = sum_j p_j (log p_j - log q_j)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.kernels.cpu import compiled_for
from burnish.model.kernels.place import has_kernel


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


@dataclass(frozen=True)
class Softmax:
    """From raw products to z; ``bias`` is [vocab]."""

    transform: LogitTransform
    inverse_temperature: float
    bias: Tensor | None = None

    def z_(self, raw: Tensor) -> Tensor:
        """z in place of ``raw``."""
        if self.bias is not None:
            raw = raw.add_(self.bias)
        z = self.transform(raw)
        return z if self.inverse_temperature == 1.0 else z.mul_(self.inverse_temperature)

    @property
    def factors(self) -> tuple[float, float]:
        """inner and outer: z = outer * (raw + bias), or outer * tanh(inner * (raw + bias)) where there is a soft-cap."""
        scale, softcap = self.transform.scale, self.transform.softcap
        if softcap is None:
            return 1.0, scale * self.inverse_temperature
        return scale / softcap, softcap * self.inverse_temperature

    @property
    def slope(self) -> float:
        """dz / draw, where no soft-cap bends it."""
        return self.transform.scale * self.inverse_temperature


class Statistics(NamedTuple):
    """Of each token, [tokens] in at least float32."""

    log_probs: Tensor
    """Of the label."""
    top1_log_probs: Tensor
    """Of the most likely token: equal to that of the label, to the bit, where the label is that token."""
    log_normalizer: Tensor
    """log sum_j exp z_j."""
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


class OutputGrads(NamedTuple):
    """Gradient of the loss in each differentiable statistic, [tokens]; None where none flows."""

    log_probs: Tensor | None
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def head_statistics(
    raw: Tensor, labels: Tensor, softmax: Softmax, *, want_entropy: bool, want_sum_squared: bool
) -> Statistics:
    """The statistics of a chunk; reads ``raw``, which may be overwritten.

    Args:
        raw: [tokens, vocab], each row contiguous; in float32 on a GPU.
        labels: [tokens] int64.
    """
    if has_kernel(raw):
        from burnish.model.kernels.gpu import head

        return head.head_statistics(raw, labels, softmax, want_entropy=want_entropy, want_sum_squared=want_sum_squared)
    compiled = compiled_for(raw)
    if compiled is not None:
        fields = compiled.statistics(raw, labels, softmax, want_entropy, want_sum_squared)
        if fields is not None:
            return Statistics(*fields)
    z = softmax.z_(_widened(raw))
    # Relative to the largest: an entropy near zero is then exact to rounding, as it is not from the normalizer.
    top = z.amax(-1)
    z.sub_(top[:, None])
    label_z = z.gather(1, labels[:, None])[:, 0]
    weights = z.exp() if want_entropy else z.exp_()
    total = weights.sum(-1)
    log_total = total.log()
    return Statistics(
        label_z - log_total,
        -log_total,
        top + log_total,
        log_total - _row_dots(weights, z) / total if want_entropy else None,
        _row_dots(weights, weights) / total.square() if want_sum_squared else None,
    )


def head_gradient_(
    raw: Tensor, labels: Tensor, softmax: Softmax, statistics: Statistics, grads: OutputGrads, dtype: torch.dtype
) -> Tensor:
    """Gradient in ``raw`` of the loss whose gradient in the statistics is ``grads``, [tokens, vocab] in ``dtype``.

    Overwrites ``raw``, whose memory it may use for the result.

    Args:
        raw: as for `head_statistics`, recomputed.
        statistics: what that gave.
        dtype: of the result; not wider than that of ``raw``.
    """
    if has_kernel(raw):
        from burnish.model.kernels.gpu import head

        return head.head_gradient_(raw, labels, softmax, statistics, grads, dtype)
    compiled = compiled_for(raw)
    if compiled is not None and raw.dtype == dtype and compiled.gradient_(raw, labels, softmax, statistics, grads):
        return raw
    log_probs = softmax.z_(_widened(raw))
    capped = _capped(log_probs, softmax)
    log_probs.sub_(statistics.log_normalizer[:, None])
    # Of each token, so that nothing of the size of the vocabulary is multiplied by constants.
    grad_label, grad_entropy, grad_squared = (None if g is None else g * softmax.slope for g in grads)
    constant = torch.zeros_like(statistics.log_normalizer) if grad_label is None else -grad_label
    if grad_entropy is None and grad_squared is None:
        grad = log_probs.exp_().mul_(constant[:, None])
    else:
        probs = log_probs.exp()
        if grad_entropy is not None:
            assert statistics.entropy is not None
            log_probs.mul_(-grad_entropy[:, None])
            constant = constant - grad_entropy * statistics.entropy
        else:
            log_probs.zero_()
        if grad_squared is not None:
            assert statistics.sum_pi_squared is not None
            log_probs.addcmul_(probs, 2.0 * grad_squared[:, None])
            constant = constant - 2.0 * grad_squared * statistics.sum_pi_squared
        grad = log_probs.add_(constant[:, None]).mul_(probs)
    if grad_label is not None:
        grad.scatter_add_(1, labels[:, None], grad_label[:, None])
    return _rounded(_through_cap(grad, capped), raw, dtype)


def joins_product(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `product_statistics` and `product_gradient` compute this: on a GPU in half precision."""
    if not has_kernel(hidden):
        return False
    from burnish.model.kernels.gpu import head_products

    return head_products.serves(hidden, weight)


def product_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, softmax: Softmax, *, want_entropy: bool, want_sum_squared: bool
) -> Statistics:
    """`head_statistics` of ``hidden @ weight.T``, of which no logits are written to memory.

    Args:
        hidden: [tokens, hidden], any number of tokens.
        weight: [vocab, hidden].
    """
    from burnish.model.kernels.gpu import head_products

    return head_products.product_statistics(
        hidden, weight, labels, softmax, want_entropy=want_entropy, want_sum_squared=want_sum_squared
    )


def product_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softmax: Softmax,
    statistics: Statistics,
    grads: OutputGrads,
    out: Tensor,
) -> Tensor:
    """`head_gradient_` of ``hidden @ weight.T``, written to ``out`` [tokens, vocab]."""
    from burnish.model.kernels.gpu import head_products

    return head_products.product_gradient(hidden, weight, labels, softmax, statistics, grads, out)


def kl_statistics(
    raw: Tensor, softmax: Softmax, other_raw: Tensor, other_softmax: Softmax
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) of the softmax p of ``raw`` and q of ``other_raw``, and both log normalizers, each [tokens].

    Reads both, which may be overwritten.
    """
    if has_kernel(raw):
        from burnish.model.kernels.gpu import head

        return head.kl_statistics(raw, softmax, other_raw, other_softmax)
    z, other_z = softmax.z_(_widened(raw)), other_softmax.z_(_widened(other_raw))
    top, other_top = z.amax(-1), other_z.amax(-1)
    z.sub_(top[:, None])
    other_z.sub_(other_top[:, None])
    log_total, other_log_total = z.logsumexp(-1), other_z.logsumexp(-1)
    difference = other_z.neg_().add_(z)
    probs = z.sub_(log_total[:, None]).exp_()
    kl = _row_dots(probs, difference) - log_total + other_log_total
    return kl, top + log_total, other_top + other_log_total


def kl_gradient_(
    raw: Tensor,
    softmax: Softmax,
    other_raw: Tensor,
    other_softmax: Softmax,
    statistics: tuple[Tensor, Tensor, Tensor],
    grad_kl: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient in ``raw`` of the loss whose gradient in the KL [tokens] is ``grad_kl``; as `head_gradient_`."""
    if has_kernel(raw):
        from burnish.model.kernels.gpu import head

        return head.kl_gradient_(raw, softmax, other_raw, other_softmax, statistics, grad_kl, dtype)
    kl, normalizer, other_normalizer = statistics
    z, other_z = softmax.z_(_widened(raw)), other_softmax.z_(_widened(other_raw))
    capped = _capped(z, softmax)
    difference = other_z.neg_().add_(z).sub_((normalizer - other_normalizer + kl)[:, None])
    grad = z.sub_(normalizer[:, None]).exp_().mul_(difference).mul_((grad_kl * softmax.slope)[:, None])
    return _rounded(_through_cap(grad, capped), raw, dtype)


def _widened(raw: Tensor) -> Tensor:
    return raw.to(torch.promote_types(raw.dtype, torch.float32))


def _rounded(grad: Tensor, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad`` in ``dtype``; over ``raw``, where that has the dtype: new memory costs a CPU more than a copy."""
    return raw.copy_(grad) if raw.dtype == dtype != grad.dtype else grad.to(dtype)


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_ij b_ij, without their product in memory."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def _capped(z: Tensor, softmax: Softmax) -> Tensor | None:
    """tanh of the soft-cap where there is one."""
    softcap = softmax.transform.softcap
    return None if softcap is None else z / (softcap * softmax.inverse_temperature)


def _through_cap(grad: Tensor, capped: Tensor | None) -> Tensor:
    return grad if capped is None else grad.mul_(capped.square_().neg_().add_(1.0))
