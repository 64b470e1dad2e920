"""The products of the head, a chunk of tokens at a time: logits, and the gradients that come of theirs."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.model.linear import inference_linear


class ChunkSize(NamedTuple):
    """How many tokens' logits exist at once."""

    elements: int
    """Logits of a chunk, unless ``least`` says more."""
    least: int
    """Rows below which a chunk's walk over the weight and its gradient is dearer than its products."""
    tile: int
    """Rows of a tile of the products."""


# 2 GiB: every chunk reads and writes the whole float32 gradient of the weight.
ON_GPU = ChunkSize(elements=1 << 29, least=256, tile=128)
# 24 MiB, which the caches hold. Products are added to the gradient of the weight where it lies.
ON_CPU = ChunkSize(elements=6 << 20, least=128, tile=16)
# 64 MiB: products come in bf16, and it takes a pass of its own to add them up in float32.
ON_CPU_IN_HALF = ChunkSize(elements=1 << 25, least=512, tile=16)
# Elements of a row.
_ALIGNED = 16


class Chunks:
    """The tokens in chunks of about one size, and the product ``hidden @ weight.T`` of one chunk at a time.

    On a GPU the products of all chunks lie in the same memory, one after the other; on a CPU oneDNN brings its own.

    Args:
        chunk_size: chosen from the vocabulary when None.
        num_products: how many chunks of such products live at once.
        dtype: of that memory; None is that of the products.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        chunk_size: int | None,
        num_products: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._hidden, self._weight = hidden, weight
        num_tokens, vocab = hidden.shape[0], weight.shape[0]
        dtype = wide_dtype(hidden) if dtype is None else dtype
        if chunk_size is None:
            # What is half as wide may have twice as many rows.
            width = vocab * num_products * dtype.itemsize // wide_dtype(hidden).itemsize
            chunk_size = even_chunk(num_tokens, width, hidden)
        self._size = max(1, min(chunk_size, num_tokens))
        self._buffer: Tensor | None = None
        if hidden.is_cuda:
            # Rows that begin at whole tiles: of others cuBLAS makes slower products.
            width = -(-vocab // _ALIGNED) * _ALIGNED
            self._buffer = hidden.new_empty(min(self._size, num_tokens), width, dtype=dtype)[:, :vocab]

    def __len__(self) -> int:
        return -(-self._hidden.shape[0] // self._size)

    def __iter__(self) -> Iterator[slice]:
        num_tokens = self._hidden.shape[0]
        return (slice(start, min(start + self._size, num_tokens)) for start in range(0, num_tokens, self._size))

    def buffer(self, rows: slice) -> Tensor:
        """[tokens, vocab], the memory of a chunk on a GPU; gone with the next one."""
        assert self._buffer is not None
        return self._buffer[: rows.stop - rows.start]

    def product(self, rows: slice) -> Tensor:
        """[tokens, vocab], in float32 of bf16 states on a GPU and rounded to bf16 on a CPU; gone with the next one."""
        hidden = self._hidden[rows]
        if self._buffer is None:
            return inference_linear(hidden, self._weight)
        return matmul(hidden, self._weight.t(), out=self._buffer[: hidden.shape[0]])


def even_chunk(num_tokens: int, vocab: int, hidden: Tensor) -> int:
    """Rows of a chunk, whole tiles, such that the last chunk is no small rest."""
    return chunk_rows(num_tokens, vocab, on_gpu=hidden.is_cuda, itemsize=hidden.dtype.itemsize)


def chunk_rows(num_tokens: int, vocab: int, *, on_gpu: bool, itemsize: int) -> int:
    """`even_chunk` of states with ``itemsize`` bytes an entry that are not there yet."""
    size = ON_GPU if on_gpu else ON_CPU if itemsize >= 4 else ON_CPU_IN_HALF
    largest = max(size.least, size.elements // vocab // size.tile * size.tile)
    num_chunks = max(1, -(-num_tokens // largest))
    return -(-num_tokens // (num_chunks * size.tile)) * size.tile


class GradientSums:
    """Gradients of hidden, weight and bias from the gradient of one chunk of logits after the other.

    The products of all chunks with the hidden states add up in float32, also where the weight is bf16.
    """

    def __init__(
        self, chunks: Chunks, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._needs_weight = needed[1]
        self._grad_hidden = torch.empty_like(hidden) if needed[0] else None
        self._grad_weight: Tensor | None = None
        # A single product is rounded once, to the dtype of the weight, wherever it is added up.
        self._sum_dtype = wide_dtype(weight) if len(chunks) > 1 else weight.dtype
        self._grad_bias = None
        if bias is not None and needed[2]:
            self._grad_bias = torch.zeros_like(bias, dtype=wide_dtype(bias))

    def add(self, rows: slice, grad: Tensor) -> None:
        """Takes the gradient of the raw product of ``rows``, [tokens, vocab] in the dtype of hidden."""
        if self._grad_hidden is not None:
            torch.mm(grad, self._weight, out=self._grad_hidden[rows])
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0, dtype=self._grad_bias.dtype))
        if self._needs_weight:
            hidden = self._hidden[rows]
            if self._grad_weight is None:
                self._grad_weight = matmul(grad.t(), hidden, dtype=self._sum_dtype)
            else:
                _add_matmul_(self._grad_weight, grad.t(), hidden)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients, each in the dtype of what it belongs to."""
        if self._grad_weight is None and self._needs_weight:
            self._grad_weight = torch.zeros_like(self._weight)
        return (
            self._grad_hidden,
            None if self._grad_weight is None else self._grad_weight.to(self._weight.dtype),
            None if self._grad_bias is None or self._bias is None else self._grad_bias.to(self._bias.dtype),
        )


def wide_dtype(a: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(a.dtype, torch.float32)


def _is_half_on_gpu(a: Tensor) -> bool:
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)


def matmul(a: Tensor, b: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """``a @ b`` in ``dtype``, at least float32 when None; rounded to the dtype of ``a`` on the way on a CPU only."""
    dtype = wide_dtype(a) if dtype is None else dtype
    if dtype == a.dtype:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if not _is_half_on_gpu(a):
        return torch.mm(a, b).to(dtype)
    if out is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b, out_dtype=dtype, out=out)


def _add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` in the dtype of ``total``, which is at least float32."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _is_half_on_gpu(a) and _adds_products_of(a.dtype, a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(matmul(a, b, dtype=total.dtype if a.is_cuda else a.dtype))


@cache
def _adds_products_of(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch adds a product of ``dtype`` to a float32 sum in place; its releases differ in that."""
    total, a = torch.zeros(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 32.0).all())
