"""The elementwise operations of a layer compiled for this machine's CPU: what is asked of the tensors, and when there are any.

A method returns None where it cannot serve these tensors; the caller then takes plain torch.
"""

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from burnish.model.kernels.cpu.build import load_or_tell

if TYPE_CHECKING:
    from burnish.model.kernels.rotary import HeadNorms

logger = logging.getLogger("burnish.model")

SOURCE = Path(__file__).with_name("layers.cpp")

# In a smaller model the time is Python's; a toy must not wait seconds for a compiler that would not make it faster, nor need one
# to give the same numbers everywhere.
MIN_HIDDEN_SIZE = 256

_BLOCK = 64  # As in layers.cpp.
_MAX_DIM = 512
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _INT, _POINTER, _INT, *[_POINTER] * 4, *[_INT] * 2, *[_FLOAT] * 2, _INT],
    "rms_norm_backward": [*[_POINTER, _INT] * 2, *[_POINTER] * 3, _INT, *[_POINTER] * 3, *[_INT] * 3],
    "silu_mul": [_POINTER, _INT, _POINTER, *[_INT] * 3],
    "silu_mul_backward": [*[_POINTER] * 2, _INT, _POINTER, *[_INT] * 3],
    "rotate": [*[_POINTER] * 2, _INT, *[_POINTER] * 4, _FLOAT, *[_INT] * 5],
    "rotate_backward": [*[_POINTER, _INT, _INT] * 3, *[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, *[_INT] * 5],
}

_kernels: "dict[torch.dtype, CompiledLayers]" = {}
_tried = False


def prepare(hidden_size: int) -> None:
    """Compiles and loads the kernels if a model of this size is worth it; once a process.

    The environment variable BURNISH_CPU_KERNELS=0 keeps the process to plain torch.
    """
    global _tried
    if _tried or hidden_size < MIN_HIDDEN_SIZE:
        return
    _tried = True
    library = load_or_tell(SOURCE, "Layers compute", logger)
    if library is not None:
        _kernels.update(kernels_of(library))


def kernels_of(library: ctypes.CDLL) -> "dict[torch.dtype, CompiledLayers]":
    """Those of ``library`` for each dtype."""
    return {dtype: CompiledLayers(library, dtype) for dtype in CompiledLayers.DTYPES}


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether there are compiled kernels for tensors of ``dtype`` in this process."""
    return dtype in _kernels


def compiled_for(x: Tensor) -> "CompiledLayers | None":
    """The compiled kernels for tensors like ``x``, if there are any."""
    return _kernels.get(x.dtype) if x.is_cpu else None


class CompiledLayers:
    """The functions of the library for tensors of one dtype; arguments are those of the functions in `burnish.model.kernels`."""

    DTYPES: ClassVar[dict[torch.dtype, str]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._step: int = library.step()
        self._call = {
            name: _function(library, f"{name}_{self.DTYPES[dtype]}", args) for name, args in _ARGUMENTS.items()
        }

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The fields of `burnish.model.kernels.norm.Normed`."""
        if not self._serves_rows(x, residual) or not self._serves(weight):
            return None
        num_rows, hidden = x.shape
        out, rstd = torch.empty(num_rows, hidden, dtype=x.dtype), torch.empty(num_rows)
        h = None if residual is None else torch.empty_like(out)
        self._call["rms_norm"](
            x.data_ptr(), x.stride(0), _address(residual), 0 if residual is None else residual.stride(0), weight.data_ptr(),
            _address(h), out.data_ptr(), rstd.data_ptr(), num_rows, hidden, eps, offset, torch.get_num_threads(),
        )  # fmt: skip
        return out, x if h is None else h, rstd

    def rms_norm_backward(
        self, grad: Tensor, summed: Tensor, rstd: Tensor, weight: Tensor, grad_summed: Tensor | None, again: bool
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """`burnish.model.kernels.rms_norm_backward`."""
        if not self._serves_rows(grad, summed, grad_summed) or not self._serves(weight):
            return None
        if rstd.dtype != torch.float32 or not rstd.is_contiguous():
            return None
        num_rows, hidden = grad.shape
        grad_h = torch.empty(num_rows, hidden, dtype=grad.dtype)
        out = torch.empty_like(grad_h) if again else None
        partial = torch.empty(_num_blocks(num_rows), hidden)
        self._call["rms_norm_backward"](
            grad.data_ptr(), grad.stride(0), summed.data_ptr(), summed.stride(0), rstd.data_ptr(), weight.data_ptr(),
            _address(grad_summed), 0 if grad_summed is None else grad_summed.stride(0), grad_h.data_ptr(), _address(out),
            partial.data_ptr(), num_rows, hidden, torch.get_num_threads(),
        )  # fmt: skip
        return grad_h, partial.sum(0), out

    def silu_mul(self, gate_up: Tensor) -> Tensor | None:
        """`burnish.model.kernels.silu_mul`."""
        if not self._serves_rows(gate_up):
            return None
        num_rows, width = gate_up.shape
        out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype)
        self._call["silu_mul"](
            gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, width // 2, torch.get_num_threads()
        )
        return out

    def silu_mul_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor | None:
        """`burnish.model.kernels.silu_mul_backward`."""
        if not self._serves_rows(gate_up) or not self._serves(grad):
            return None
        num_rows, width = gate_up.shape
        out = torch.empty(num_rows, width, dtype=gate_up.dtype)
        self._call["silu_mul_backward"](
            grad.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, width // 2,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, norms: "HeadNorms | None"
    ) -> Tensor | None:
        """Queries and keys of `burnish.model.kernels.rotate`, [tokens, num_heads + num_kv_heads, head_dim]."""
        weights = () if norms is None else norms[:2]
        if not self._serves(qkv, cos, sin, *weights):
            return None
        num_tokens, dim = cos.shape
        out = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, dim))[:, :-num_kv_heads]
        if norms is not None:
            out = torch.empty(out.shape, dtype=qkv.dtype)
        self._call["rotate"](
            qkv.data_ptr(), out.data_ptr(), out.stride(0), cos.data_ptr(), sin.data_ptr(), *_weights_of(norms), num_tokens,
            num_heads, num_kv_heads, dim, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate_backward(
        self,
        grads: tuple[Tensor, Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        qkv: Tensor | None,
        norms: "HeadNorms | None",
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None] | None:
        """`burnish.model.kernels.rotate_backward`."""
        weights = () if norms is None or qkv is None else (qkv, *norms[:2])
        if not self._serves(cos, sin, *weights) or cos.shape[1] > _MAX_DIM or cos.shape[1] % 2:
            return None
        if any(grad.dtype != self._dtype or grad.stride(2) != 1 for grad in grads):
            return None
        num_heads, num_kv_heads = grads[0].shape[1], grads[1].shape[1]
        num_tokens, dim = cos.shape
        out = torch.empty(num_tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=self._dtype)
        half, padded = dim // 2, -(-dim // 2 // self._step) * self._step
        partial = None if norms is None else torch.empty(_num_blocks(num_tokens), 2, 2, padded)
        places = (number for grad in grads for number in (grad.data_ptr(), *grad.stride()[:2]))
        self._call["rotate_backward"](
            *places, cos.data_ptr(), sin.data_ptr(), _address(qkv if weights else None), *_weights_of(norms), out.data_ptr(),
            _address(partial), num_tokens, num_heads, num_kv_heads, dim, torch.get_num_threads(),
        )  # fmt: skip
        if partial is None:
            return out, None
        grad_query, grad_key = partial.sum(0)[..., :half].reshape(2, dim)
        return out, (grad_query, grad_key)

    def _serves(self, *tensors: Tensor) -> bool:
        """Whether these are of its dtype and contiguous."""
        return all(tensor.dtype == self._dtype and tensor.is_contiguous() for tensor in tensors)

    def _serves_rows(self, *tensors: Tensor | None) -> bool:
        """Whether these are matrices of its dtype whose rows are contiguous."""
        return all(x is None or (x.dtype == self._dtype and x.dim() == 2 and x.stride(1) == 1) for x in tensors)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _weights_of(norms: "HeadNorms | None") -> tuple[int | None, int | None, float]:
    """Their addresses, and eps."""
    return (None, None, 0.0) if norms is None else (norms.query.data_ptr(), norms.key.data_ptr(), norms.eps)


def _num_blocks(rows: int) -> int:
    return -(-rows // _BLOCK)


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function
