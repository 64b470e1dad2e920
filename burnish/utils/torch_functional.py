"""Masked statistics of tensors.

Masking is by ``where``, never by multiplication: what lies outside a mask (NaN and inf included) takes part in nothing.
Statistics are taken in fp32 or higher, in two passes.
"""

import torch
from torch import Tensor

from burnish.utils.errors import TrainingError


def at_least_fp32(tensor: Tensor) -> Tensor:
    """``tensor`` in fp32, or as it is when it is wider (float64)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_mask(mask: Tensor, like: Tensor, name: str = "mask") -> Tensor:
    """``mask`` as a bool tensor of the shape of ``like``.

    Args:
        mask: bool, or any dtype that holds only 0 and 1 (looked at, which costs a synchronisation on a GPU).
        like: a tensor of the shape that the mask must have.
        name: what the caller calls the mask, for messages.

    Raises:
        TrainingError: another shape (a mask is never broadcast), or a value that is neither 0 nor 1.
    """
    if mask.shape != like.shape:
        raise TrainingError(
            f"{name} has shape {tuple(mask.shape)}, but what it masks has shape {tuple(like.shape)}: "
            f"a mask is not broadcast, pass one entry per element."
        )
    if mask.dtype == torch.bool:
        return mask
    as_bool = mask == 1
    if not torch.equal(as_bool, mask != 0):
        raise TrainingError(f"{name} holds values other than 0 and 1: pass a mask (torch.bool), not weights or scores.")
    return as_bool


def check_shapes(like: Tensor, **tensors: Tensor) -> None:
    """Refuses tensors that would broadcast against ``like``, or not fit it at all.

    Raises:
        TrainingError: a tensor of another shape, by its keyword.
    """
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise TrainingError(
                f"{name} has shape {tuple(tensor.shape)}, but what it belongs to has shape {tuple(like.shape)}: "
                f"both hold one entry per response token."
            )


def check_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Refuses NaN and inf inside ``mask``, in what a formula takes as constant.

    Only on a CPU: on a GPU looking would wait for everything that is queued there.

    Args:
        mask: bool.
        tensors: tensors of the shape of the mask, by the name that a message should use.

    Raises:
        TrainingError: a tensor of another shape, or with NaN or inf inside the mask: its name, how many and where the
            first one is.
    """
    check_shapes(mask, **tensors)
    for name, tensor in tensors.items():
        # A sum is finite only if all it adds is: most tensors need no look at the mask.
        if tensor.device.type != "cpu" or tensor.detach().sum().isfinite():
            continue
        wrong = (mask & ~tensor.isfinite()).nonzero()
        if len(wrong):
            place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "token"), wrong[0].tolist(), strict=False))
            raise TrainingError(
                f"{name} holds NaN or inf in {len(wrong)} of the {int(mask.count_nonzero())} entries inside the mask, "
                f"the first at {place}: nothing can be learned from it. Look at what computed {name}."
            )


def zero_outside(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, in fp32 or wider, with zeros where ``mask`` is False.

    Zeroing the inputs of a formula, and not only its result, keeps the gradient clean too: the derivative of what a
    ``where`` discards is multiplied by zero, and 0 * NaN is NaN.

    Args:
        mask: bool, of any shape.
        tensors: tensors of the shape of the mask, by the name that a message should use.

    Raises:
        TrainingError: a tensor of another shape, by name.
    """
    check_shapes(mask, **tensors)
    return tuple(torch.where(mask, at_least_fp32(tensor), 0.0) for tensor in tensors.values())


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of ``values`` where ``mask`` is 1, over ``axis`` (None: over everything)."""
    (kept,) = zero_outside(as_mask(mask, values), values=values)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """sum(where(mask, values, 0)) / (sum(mask) + 1e-8), over ``axis`` (None: over everything); 0 for an empty mask."""
    mask = as_mask(mask, values)
    total = masked_sum(values, mask, axis)
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return total / (count.to(total.dtype) + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of ``values`` where ``mask`` is 1, in two passes; unbiased divides by N - 1.

    0 when fewer than two values are in the mask (where the unbiased variance is not defined). No gradient is taken
    through it.
    """
    mask = as_mask(mask, values)
    centered, _ = _centered(values, mask)
    return _mean_square(centered, mask, unbiased).to(centered.dtype)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) * rsqrt(var + 1e-8) where ``mask`` is 1 and 0 elsewhere. No gradient is taken through it.

    Args:
        values: any shape.
        mask: of the shape of ``values``.
        shift_mean: whether the result has mean 0; False adds the mean back and only rescales.

    Equal values become exactly 0, however many there are.
    """
    mask = as_mask(mask, values)
    centered, mean = _centered(values, mask)
    scale = torch.rsqrt(_mean_square(centered, mask, unbiased=True) + 1e-8)
    whitened = centered.mul_(scale.to(centered.dtype))
    return whitened if shift_mean else whitened.add_(mean).masked_fill_(~mask, 0.0)


@torch.no_grad()
def _centered(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``values - mean`` (a new tensor, 0 outside the mask) and the mean."""
    values = at_least_fp32(values.detach())
    # Shifted by one of the values first: equal values then have a mean without rounding, and leave no float noise that
    # whitening would blow up by rsqrt(1e-8) = 1e4.
    pivot = values.flatten()[mask.flatten().to(torch.uint8).argmax()] if mask.any() else values.new_zeros(())
    # In place from here on: a batch of long responses is large, and memory that was never touched is slow.
    centered = torch.where(mask, values, pivot).sub_(pivot)
    offset = centered.sum() / mask.count_nonzero().clamp(min=1)
    return centered.sub_(offset).masked_fill_(~mask, 0.0), pivot + offset


def _mean_square(centered: Tensor, mask: Tensor, unbiased: bool) -> Tensor:
    """In float64."""
    count = mask.count_nonzero()
    # By rows first, so that no second matrix is made, and then in float64.
    row_norms = torch.linalg.vector_norm(centered, dim=-1)
    if not row_norms.isfinite().all():
        # Squares beyond float32 would make the variance infinite, and everything that is whitened by it 0. This is slow.
        row_norms = torch.linalg.vector_norm(centered, dim=-1, dtype=torch.float64)
    total = row_norms.double().square().sum() / (count - int(unbiased)).clamp(min=1)
    return torch.where(count < 2, 0.0, total)
