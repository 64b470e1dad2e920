"""Tensors in, tensors out: what is asked of the tensors, and the addresses that ``head.cpp`` gets.

A method returns None where it cannot serve these tensors; the caller then takes plain torch.
"""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from burnish.model.kernels.head import OutputGrads, Softmax, Statistics

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_LOGITS = [_POINTER, _INT, *[_POINTER] * 2, *[_INT] * 3, *[_FLOAT] * 2]
_ARGUMENTS: dict[str, list[Any]] = {
    "head_statistics": [*_LOGITS, *[_POINTER] * 5, _INT],
    "head_gradient": [*_LOGITS, *[_POINTER] * 6, _INT],
}


class CompiledHead:
    """The functions of the library for logits of one dtype."""

    DTYPES: ClassVar[dict[torch.dtype, str]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._statistics, self._gradient = (
            _function(library, f"{name}_{self.DTYPES[dtype]}", arguments) for name, arguments in _ARGUMENTS.items()
        )

    def statistics(
        self, raw: Tensor, labels: Tensor, softmax: "Softmax", want_entropy: bool, want_sum_squared: bool
    ) -> "tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None":
        """The fields of `burnish.model.kernels.head.Statistics`; ``raw`` stays as it is."""
        logits = _logits(raw, labels, softmax)
        if logits is None:
            return None
        log_probs, top1, normalizer, entropy, squares = (torch.empty(raw.shape[0]) for _ in range(5))
        self._statistics(
            *logits,
            log_probs.data_ptr(),
            top1.data_ptr(),
            normalizer.data_ptr(),
            entropy.data_ptr() if want_entropy else None,
            squares.data_ptr() if want_sum_squared else None,
            torch.get_num_threads(),
        )
        return log_probs, top1, normalizer, entropy if want_entropy else None, squares if want_sum_squared else None

    def gradient_(
        self, raw: Tensor, labels: Tensor, softmax: "Softmax", statistics: "Statistics", grads: "OutputGrads"
    ) -> bool:
        """Writes the gradient of `burnish.model.kernels.head.head_gradient_` over ``raw``. Returns whether it could."""
        logits = _logits(raw, labels, softmax)
        if logits is None:
            return False
        columns = (statistics.log_normalizer, statistics.entropy, statistics.sum_pi_squared, *grads)
        # Held until the call is over: an address keeps nothing alive.
        held = [None if column is None else column.contiguous() for column in columns]
        if any(column is not None and column.dtype != torch.float32 for column in held):
            return False
        self._gradient(*logits, *(None if c is None else c.data_ptr() for c in held), torch.get_num_threads())
        return True


def _logits(raw: Tensor, labels: Tensor, softmax: "Softmax") -> list[Any] | None:
    """The arguments that both functions begin with."""
    bias = softmax.bias
    if bias is not None and not (bias.dtype == raw.dtype and bias.is_contiguous()):
        return None
    if raw.stride(1) != 1 or labels.dtype != torch.int64 or not labels.is_contiguous():
        return None
    return [
        raw.data_ptr(),
        raw.stride(0),
        None if bias is None else bias.data_ptr(),
        labels.data_ptr(),
        *raw.shape,
        softmax.transform.softcap is not None,
        *softmax.factors,
    ]


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function
