"""How a check says that an algorithm is wrong: a `Violation`, whose message is a sentence."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from burnish.conformance.batches import RaggedBatch


class Violation(AssertionError):
    """An algorithm does not do what it must; the message says what, where and by how much."""


def must(holds: bool | Tensor, sentence: str) -> None:
    """Raises a `Violation` that says ``sentence`` unless ``holds``."""
    if not holds:
        raise Violation(sentence)


def close(what: str, got: Tensor | float, want: Tensor | float | list, tolerance: float = 1e-9) -> None:
    """``got`` equals ``want`` entry by entry, to ``tolerance`` of the larger of 1 and the largest entry of ``want``.

    ``want`` must be finite: to a tolerance of infinity anything is close.
    """
    got, want = _wide(got), _wide(want)
    must(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, but it must have {tuple(want.shape)}.")
    if want.numel() == 0:
        return
    must(bool(want.isfinite().all()), f"{what} cannot be checked: what it must be holds NaN or inf.")
    difference = (got - want).abs().nan_to_num(nan=torch.inf)
    allowed = tolerance * max(1.0, float(want.abs().max()))
    must(
        bool(difference.max() <= allowed),
        f"{what}{_place(difference)} is {_entry(got, difference)}, but it must be {_entry(want, difference)} "
        f"(allowed difference {allowed:.0e}).",
    )


def close_in_norm(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """``got`` equals ``want`` to ``tolerance`` of the norm of ``want``."""
    got, want = got.detach().double(), want.detach().double()
    scale = float(want.norm())
    must(scale > 0, f"{what} has a norm of {scale}: there is nothing to compare with.")
    error = float((got - want).norm()) / scale
    must(error <= tolerance, f"{what} differs by {error:.1e} of its norm; allowed are {tolerance:.0e}.")


def unchanged(what: str, batch: RaggedBatch, before: RaggedBatch) -> None:
    """No tensor of ``batch`` was written to."""
    for field in fields(batch):
        now, then = getattr(batch, field.name), getattr(before, field.name)
        must(not isinstance(now, Tensor) or torch.equal(now, then), f"{what} writes into its input {field.name}.")


def _wide(values: Tensor | float | list) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach()


def _entry(tensor: Tensor, difference: Tensor) -> str:
    return f"{tensor.flatten()[difference.argmax()].item():.10g}"


def _place(difference: Tensor) -> str:
    if difference.dim() == 0:
        return ""
    index = torch.unravel_index(difference.argmax(), difference.shape)
    names = ("row", "token") if difference.dim() == 2 else ("row",)
    return " of " + ", ".join(f"{name} {int(i)}" for name, i in zip(names, index, strict=False))
