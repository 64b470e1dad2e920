"""Attention of one new token of each sequence to the sequence's tokens in the paged cache."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.model.padded_attention import softcapped_attention
from burnish.rollout.native.kernels.cpu import compiled_for
from burnish.rollout.native.kernels.store import gather_torch
from burnish.rollout.native.paged_cache import PagedCache


def decode_attention(
    query: Tensor,
    cache: PagedCache,
    layer: int,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int = 1,
    step: "DecodeStep | None" = None,
) -> Tensor:
    """softmax(scaling q k^T) v over the last tokens of each sequence, grouped query heads (arXiv:2305.13245).

    Args:
        query: [rows, num_heads, head_dim], of the cache's dtype, the last axis contiguous.
        block_tables: int32 [rows, width]; token t of a row is in block ``block_tables[row, t // block_size]``.
        lengths: int32 [rows], tokens to attend to, the newest one included, at least 1.
        sliding_window: the number of tokens seen, counted back from the newest; None is all.
        softcap: c of ``c * tanh(scores / c)``; None is none.
        num_splits: on a GPU, into how many parts the tokens of a row are cut so that few rows fill it
            (`num_splits_for`); fixed inside a captured graph.
        step: on a CPU, what the layers of one decode step share; made here if it is None.

    Returns:
        [rows, num_heads, value_dim].

    Raises:
        ValueError: a query of another dtype than the cache's.
    """
    if query.dtype != cache.dtype:
        raise ValueError(f"decode_attention was given queries in {query.dtype} and a cache in {cache.dtype}; cast one.")
    if query.is_cuda:
        from burnish.rollout.native.kernels.gpu import decode_attention as gpu

        return gpu.decode_attention(
            query,
            cache,
            layer,
            block_tables,
            lengths,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            num_splits=num_splits,
        )
    compiled = compiled_for(query)
    if compiled is not None:
        output = compiled.decode_attention(
            query,
            cache,
            layer,
            block_tables,
            lengths,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        if output is not None:
            return output
    if step is None:
        step = DecodeStep(block_tables, lengths, cache.block_size)
    return decode_attention_torch(
        query, cache, layer, step, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )


def num_splits_for(rows: int, num_kv_heads: int, longest: int, num_multiprocessors: int = 132) -> int:
    """Into how many parts to cut each row so that the GPU is full, at least 128 tokens to a part, at most 16 parts."""
    programs = rows * num_kv_heads
    wanted = -(-4 * num_multiprocessors // programs)
    return max(1, min(wanted, longest // 128, 16)) if wanted > 2 else 1


class DecodeStep:
    """What all layers of one decode step share in plain torch; the two tensors must not change meanwhile."""

    def __init__(self, block_tables: Tensor, lengths: Tensor, block_size: int) -> None:
        self.block_tables = block_tables
        self.lengths = lengths
        self._block_size = block_size
        self._visible: dict[int | None, Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._places: Tensor | None = None

    @cached_property
    def longest(self) -> int:
        """The largest of ``lengths``."""
        return int(self.lengths.max())

    @cached_property
    def first_block(self) -> int | None:
        """Where the blocks of the rows begin if they follow each other and each holds a whole sequence; then keys and
        values are read where they lie. Else None: they are gathered."""
        return _first_of_dense(self.block_tables[:, 0]) if self.longest <= self._block_size else None

    def cached(self, cache: PagedCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, longest, num_kv_heads, dim]; past a row's end they are anything, but finite."""
        if self.first_block is not None:
            rows = slice(self.first_block, self.first_block + len(self.lengths))
            return cache.key(layer)[rows, : self.longest], cache.value(layer)[rows, : self.longest]
        if self._places is None:
            # A table may hold anything after a row's last block, so what is past the end reads the last token.
            token = torch.arange(self.longest, device=self.lengths.device).minimum(self.lengths[:, None] - 1).long()
            block = self.block_tables.long().gather(1, token // self._block_size)
            self._places = (block * self._block_size + token % self._block_size).flatten()
        key, value = gather_torch(cache, layer, self._places)
        shape = (len(self.lengths), self.longest)
        return key.unflatten(0, shape), value.unflatten(0, shape)

    def visible(self, window: int | None) -> Tensor:
        """[rows, 1, 1, longest] bool: tokens of the row, inside the window that ends with its newest."""
        if window not in self._visible:
            age = self.lengths[:, None] - 1 - torch.arange(self.longest, device=self.lengths.device)
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            self._visible[window] = seen[:, None, None]
        return self._visible[window]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`visible` as a term of the scores."""
        if (window, dtype) not in self._masks:
            visible = self.visible(window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[window, dtype] = zeros.masked_fill_(~visible, float("-inf"))
        return self._masks[window, dtype]


def _first_of_dense(blocks: Tensor) -> int | None:
    """The first of ``blocks`` if each of the others is one more than the one before it."""
    first = int(blocks[0])
    dense = torch.arange(first, first + len(blocks), dtype=blocks.dtype, device=blocks.device)
    return first if torch.equal(blocks, dense) else None


def decode_attention_torch(
    query: Tensor,
    cache: PagedCache,
    layer: int,
    step: DecodeStep,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """`decode_attention` in plain torch."""
    num_rows, num_heads, head_dim = query.shape
    key, value = (x.transpose(1, 2) for x in step.cached(cache, layer))
    # The query heads that share a key head stand as its queries, so that no key is expanded.
    query = query.reshape(num_rows, key.shape[1], -1, head_dim)
    if softcap is not None:
        visible = step.visible(sliding_window)
        output = softcapped_attention(query, key, value, visible, scaling=scaling, softcap=softcap)
    else:
        mask = step.mask(sliding_window, query.dtype)
        if query.dtype == torch.float32:
            # Faster than the fused kernel for so few queries, where a head's keys lie together; rounded scores would
            # make it worse than that in half precision.
            scores = torch.matmul(query, key.transpose(2, 3)).mul_(scaling).add_(mask)
            output = torch.matmul(scores.softmax(-1), value)
        else:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(num_rows, num_heads, -1)
