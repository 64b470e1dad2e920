"""Tensors in, tensors out: what is asked of the tensors, and the addresses that ``kernels.cpp`` gets.

A method returns None where it cannot serve these tensors; the caller then takes plain torch.
"""

import ctypes
from typing import Any, ClassVar

import torch
from torch import Tensor

from burnish.rollout.native.paged_cache import LAYOUT_SIZE, PagedCache

_MAX_DIM = 512
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _INT, _POINTER, _INT, *[_POINTER] * 3, _INT, _INT, _FLOAT, _FLOAT, _INT],
    "silu_mul": [_POINTER, _INT, _POINTER, *[_INT] * 3],
    "rotate_and_store": [*[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, *[_INT] * 5],
    "store": [*[_POINTER] * 3, _INT, _INT, _POINTER, *[_INT] * 6],
    "decode_attention": [
        *[_POINTER, _INT, _INT], *[_POINTER] * 2, _INT, *[_POINTER] * 2, *[_INT] * 5, *[_FLOAT] * 2, _INT, _INT,
    ],
    "draw": [_POINTER, *[_INT] * 3, *[_POINTER] * 5, _INT],
}  # fmt: skip


class CompiledKernels:
    """The functions of the library for tensors of one dtype; their arguments are those of the functions around them."""

    DTYPES: ClassVar[dict[torch.dtype, str]] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._rms_norm, self._silu_mul, self._rotate_and_store, self._store, self._decode_attention, self._draw = (
            _function(library, f"{name}_{self.DTYPES[dtype]}", arguments) for name, arguments in _ARGUMENTS.items()
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """`burnish.rollout.native.kernels.rms_norm`."""
        if x.dim() != 2 or x.stride(1) != 1 or weight.dtype != x.dtype or not weight.is_contiguous():
            return None
        num_rows, hidden = x.shape
        out = torch.empty(num_rows, hidden, dtype=x.dtype)
        if residual is None:
            self._rms_norm(
                x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), None, out.data_ptr(), num_rows, hidden, eps, offset,
                torch.get_num_threads(),
            )  # fmt: skip
            return out
        if residual.dtype != x.dtype or residual.stride(1) != 1 or residual.shape != x.shape:
            return None
        h = torch.empty_like(out)
        self._rms_norm(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(), h.data_ptr(),
            out.data_ptr(), num_rows, hidden, eps, offset, torch.get_num_threads(),
        )  # fmt: skip
        return out, h

    def silu_mul(self, gate_up: Tensor) -> Tensor | None:
        """`burnish.rollout.native.kernels.silu_mul`."""
        if gate_up.dim() != 2 or gate_up.stride(1) != 1:
            return None
        num_rows, width = gate_up.shape
        out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype)
        self._silu_mul(
            gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, width // 2, torch.get_num_threads()
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        layer: int,
        places: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> bool:
        """`burnish.rollout.native.kernels.rotate_and_store`, with one row of ``cos`` and ``sin`` a token.

        Returns:
            whether it could.
        """
        if not (qkv.dtype == cos.dtype == sin.dtype == cache.dtype and places.dtype == torch.int64):
            return False
        if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and places.is_contiguous()):
            return False
        q_weight = k_weight = None
        if q_norm is not None and k_norm is not None:
            if not (q_norm.dtype == k_norm.dtype == qkv.dtype and q_norm.is_contiguous() and k_norm.is_contiguous()):
                return False
            q_weight, k_weight = q_norm.data_ptr(), k_norm.data_ptr()
        num_tokens, dim = cos.shape
        self._rotate_and_store(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_weight, k_weight, eps, _layout(cache, layer),
            places.data_ptr(), num_tokens, num_heads, num_kv_heads, dim, torch.get_num_threads(),
        )  # fmt: skip
        return True

    def store(self, cache: PagedCache, layer: int, places: Tensor, key: Tensor, value: Tensor) -> bool:
        """`burnish.rollout.native.kernels.store`. Returns whether it could."""
        if not (key.stride(2) == value.stride(2) == 1 and key.dtype == value.dtype == cache.dtype):
            return False
        if places.dtype != torch.int64 or not places.is_contiguous():
            return False
        num_tokens, heads, key_dim = key.shape
        self._store(
            _layout(cache, layer), places.data_ptr(), key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(),
            value.stride(0), value.stride(1), num_tokens, heads, key_dim, value.shape[2],
        )  # fmt: skip
        return True

    def decode_attention(
        self,
        query: Tensor,
        cache: PagedCache,
        layer: int,
        block_tables: Tensor,
        lengths: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor | None:
        """`burnish.rollout.native.kernels.decode_attention`."""
        shape = cache.layers[layer]
        if query.stride(2) != 1 or max(shape.key_dim, shape.value_dim) > _MAX_DIM:
            return None
        if not (block_tables.dtype == lengths.dtype == torch.int32 and lengths.is_contiguous()):
            return None
        if block_tables.stride(1) != 1:
            return None
        num_rows, num_heads, _ = query.shape
        out = torch.empty(num_rows, num_heads, shape.value_dim, dtype=query.dtype)
        self._decode_attention(
            query.data_ptr(), query.stride(0), query.stride(1), _layout(cache, layer), block_tables.data_ptr(),
            block_tables.stride(0), lengths.data_ptr(), out.data_ptr(), num_rows, num_heads, shape.num_kv_heads,
            shape.key_dim, shape.value_dim, scaling, softcap or 0.0, sliding_window or 0, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def draw(
        self, logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens and log-probs of `burnish.rollout.native.sampler.draw` where nothing truncates."""
        num_rows, vocab = logits.shape
        contiguous = keys.is_contiguous() and positions.is_contiguous() and temperature.is_contiguous()
        if not (contiguous and temperature.dtype == torch.float32 and logits.stride(1) == 1):
            return None
        tokens, log_probs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
        self._draw(
            logits.data_ptr(), logits.stride(0), num_rows, vocab, temperature.data_ptr(), keys.data_ptr(),
            positions.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens, log_probs


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function


def _layout(cache: PagedCache, layer: int) -> int:
    """Address of a layer's row of ``cache.layouts``."""
    return cache.layouts.data_ptr() + 8 * LAYOUT_SIZE * layer
