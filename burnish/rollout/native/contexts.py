"""Prefill and decode as attention contexts: what the model's attention does while it generates.

Each serves both ways to run a model: `attend` is what a Hugging Face module calls, `attend_packed` what the fast path does,
which has stored its keys and values already.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.model.attention import PackedContext, has_varlen_kernel, varlen_attention
from burnish.model.padded_attention import softcapped_attention
from burnish.rollout.native import kernels
from burnish.rollout.native.paged_cache import PagedCache
from burnish.rollout.native.scheduler import PrefillChunk


class PrefillContext:
    """Chunks of prompts packed in one row: each token attends to its own prompt, as far as it is there.

    Attributes:
        cache: where keys and values go.
        places: int64 [tokens], the flat place of each token in the cache.
        input_ids, positions: int64 [tokens].
    """

    def __init__(self, cache: PagedCache, chunks: Sequence[PrefillChunk]) -> None:
        self.cache = cache
        device = cache.device
        self._starts = [chunk.start for chunk in chunks]
        self._lengths = [len(chunk.token_ids) for chunk in chunks]
        self._ends = [start + length for start, length in zip(self._starts, self._lengths, strict=True)]
        # The flat places of all tokens of each prompt that are there after this call.
        whole = [_places(chunk.blocks, end, cache.block_size) for chunk, end in zip(chunks, self._ends, strict=True)]
        own = [places[start:] for places, start in zip(whole, self._starts, strict=True)]
        positions = [np.arange(start, end) for start, end in zip(self._starts, self._ends, strict=True)]
        ids = [np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks]
        self.places, self.positions, self.input_ids = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device) for parts in (own, positions, ids)
        )
        self._packed = PackedContext(self._lengths, device)
        self._past: Tensor | None = None
        if any(self._starts):
            self._past = torch.from_numpy(np.concatenate(whole).astype(np.int64)).to(device)
            self._key_ends = torch.tensor([0, *np.cumsum(self._ends).tolist()], dtype=torch.int32, device=device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [1, query_heads, tokens, head_dim] -> [1, tokens, query_heads, value_dim]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        kernels.store(self.cache, layer, self.places, key, value)
        output = self._attend(layer, query, key, value, scaling, sliding_window, softcap)
        return output.unsqueeze(0)

    def attend_packed(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """query [tokens, query_heads, head_dim] -> [tokens, query_heads * head_dim]; keys and values are stored."""
        return self._attend(layer, query, key, value, scaling, sliding_window, None).flatten(1)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if self._past is None:
            return self._packed.attend_tokens(
                query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
            )
        key, value = kernels.gather(self.cache, layer, self._past)
        if has_varlen_kernel(query, value, softcap):
            return varlen_attention(
                query,
                key,
                value,
                (self._packed.cu_seqlens, self._key_ends),
                (max(self._lengths), max(self._ends)),
                scaling=scaling,
                sliding_window=sliding_window,
            )
        outputs, first_query, first_key = [], 0, 0
        for start, length, end in zip(self._starts, self._lengths, self._ends, strict=True):
            queries, keys = slice(first_query, first_query + length), slice(first_key, first_key + end)
            outputs.append(
                _late_queries(query[queries], key[keys], value[keys], start, scaling, sliding_window, softcap)
            )
            first_query, first_key = first_query + length, first_key + end
        return torch.cat(outputs)


def _places(blocks: Sequence[int], count: int, block_size: int) -> np.ndarray:
    """Flat places of the first ``count`` tokens of a sequence in these blocks."""
    token = np.arange(count)
    return np.asarray(blocks, dtype=np.int64)[token // block_size] * block_size + token % block_size


def _late_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of the tokens from ``start`` on: query [queries, heads, dim], key and value [keys, heads, dim]."""
    positions = torch.arange(start, start + query.shape[0], device=query.device)
    age = positions[:, None] - torch.arange(key.shape[0], device=query.device)
    visible = age >= 0 if sliding_window is None else (age >= 0) & (age < sliding_window)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    if softcap is not None:
        output = softcapped_attention(query, key, value, visible, scaling=scaling, softcap=softcap)
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    return output[0].transpose(0, 1)


class DecodeContext:
    """One new token of each row: stores its key and value, then attends to what the row's blocks hold.

    Args:
        lengths: int32 [rows], tokens that each row holds already; equally the new token's position.
        block_tables: int32 [rows, blocks].

    Attributes:
        cache: where keys and values go.
        places: int64 [rows], the flat place of each new token in the cache.
    """

    def __init__(self, cache: PagedCache, lengths: Tensor, block_tables: Tensor) -> None:
        self.cache = cache
        self._block_tables, self._lengths = block_tables, lengths + 1
        block = block_tables.gather(1, (lengths // cache.block_size)[:, None].long())[:, 0]
        self.places = block.long() * cache.block_size + lengths % cache.block_size
        on_gpu = block_tables.is_cuda
        self._step = None if on_gpu else kernels.DecodeStep(block_tables, self._lengths, cache.block_size)
        self._capacity = block_tables.shape[1] * cache.block_size

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [rows, query_heads, 1, head_dim] -> [rows, 1, query_heads, value_dim]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        kernels.store(self.cache, layer, self.places, key[:, :, 0], value[:, :, 0])
        return self._attend(layer, query[:, :, 0], scaling, sliding_window, softcap).unsqueeze(1)

    def attend_packed(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """query [rows, query_heads, head_dim] -> [rows, query_heads * head_dim]; keys and values are stored."""
        return self._attend(layer, query, scaling, sliding_window, None).flatten(1)

    def _attend(
        self, layer: int, query: Tensor, scaling: float, sliding_window: int | None, softcap: float | None
    ) -> Tensor:
        return kernels.decode_attention(
            query,
            self.cache,
            layer,
            self._block_tables,
            self._lengths,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            # Fixed in a captured graph, so by the longest sequence that there can be.
            num_splits=kernels.num_splits_for(query.shape[0], self.cache.layers[layer].num_kv_heads, self._capacity),
            step=self._step,
        )
