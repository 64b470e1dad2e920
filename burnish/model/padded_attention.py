"""Attention where there is no kernel for packed rows: segments of like length are padded together."""

from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from burnish.model.gathering import Gathering

# cuDNN, where it computes the case.
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def prefers_dense(query: Tensor) -> bool:
    """Whether causal attention of equally long rows is faster as such than as packed rows.

    On a Hopper GPU cuDNN's kernels take half the time of those for packed rows, forward and backward.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 128
        and torch.backends.cudnn.is_available()
        and _capability(query.device) >= (9, 0)
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of equally long rows, all starting at their first token.

    Args:
        query: [batch, query_heads, tokens, head_dim]; key and value have key_value_heads, a divisor of query_heads.

    Returns:
        [batch, query_heads, tokens, value_dim].
    """
    num_tokens = query.shape[2]
    windowed = sliding_window is not None and sliding_window < num_tokens
    if softcap is None and not windowed:
        with sdpa_kernel(_FASTEST_FIRST, set_priority=True) if prefers_dense(query) else nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    if windowed:
        assert sliding_window is not None
        visible = visible.triu(1 - sliding_window)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    return softcapped_attention(query, key, value, visible, scaling=scaling, softcap=softcap)


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scaling: float, softcap: float
) -> Tensor:
    """softmax(c tanh(q k^T s / c)) v over the visible keys, in at least float32 (Gemma 2, arXiv:2408.00118).

    Args:
        query: [batch, query_heads, queries, head_dim].
        key: [batch, key_value_heads, keys, head_dim].
        visible: bool, broadcastable to [batch, 1, queries, keys]; every query sees a key.

    Returns:
        [batch, query_heads, queries, value_dim].
    """
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, 1), value.repeat_interleave(num_groups, 1)
    scores = (query @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).to(value.dtype) @ value


class Padding:
    """Segments padded in buckets of like ones.

    In a bucket every segment has its prefix on the left, padded at its beginning, and its own tokens after that, padded at
    their end. So the distance of a query and a key is the same in all segments, and causality hides the padding at the end.
    """

    # The shortest of a bucket over its longest. Fewer buckets are fewer calls, fuller ones less wasted work.
    MIN_FILL = 0.6

    def __init__(
        self, lengths: list[int], starts: list[int], prefixes: list[tuple[int, int]], device: torch.device
    ) -> None:
        groups = self._group(lengths, prefixes)
        self.buckets = [
            _Bucket(
                [starts[s] for s in group], [lengths[s] for s in group], [prefixes[s] for s in group], device=device
            )
            for group in groups
        ]
        self._num_queries = [bucket.queries.numel() for bucket in self.buckets]
        self._num_keys = [bucket.keys.numel() for bucket in self.buckets]
        queries = torch.cat([bucket.queries.flatten() for bucket in self.buckets])
        real = torch.cat([bucket.is_real.flatten() for bucket in self.buckets])
        keys = torch.cat([bucket.keys.flatten() for bucket in self.buckets])
        visible = torch.cat([bucket.has_key.flatten() for bucket in self.buckets])
        num_tokens = starts[-1]
        self._queries = Gathering(queries, num_tokens, counts=real, device=device)
        self._keys = Gathering(keys, num_tokens, counts=visible, device=device)
        place = torch.empty(num_tokens, dtype=torch.int64)
        place[queries[real]] = real.nonzero()[:, 0]
        self._outputs = Gathering(place, len(queries), device=device)

    @classmethod
    def _group(cls, lengths: list[int], prefixes: list[tuple[int, int]]) -> list[list[int]]:
        """Segments of each bucket, in packed order: of like length, after prefixes of like length."""

        def like(sizes: list[int], segments: list[int]) -> list[list[int]]:
            found: list[list[int]] = []
            for segment in sorted(segments, key=lambda segment: -sizes[segment]):
                if found and sizes[segment] >= cls.MIN_FILL * sizes[found[-1][0]]:
                    found[-1].append(segment)
                else:
                    found.append([segment])
            return found

        of_prefix = like([prefix for _, prefix in prefixes], list(range(len(lengths))))
        return [sorted(group) for segments in of_prefix for group in like(lengths, segments)]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """As `PackedContext.attend_tokens`."""
        dtype = query.dtype
        padded = [self._queries(query), self._keys(key), self._keys(value)]
        if not query.is_cuda:
            # The CPU's kernel is no faster in bf16, and its backward on short rows takes twice as long.
            padded = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in padded]
        query_parts, key_parts, value_parts = (
            # Not even one part: the backward of a split copies.
            [x] if len(self.buckets) == 1 else x.split(sizes)
            for x, sizes in zip(padded, (self._num_queries, self._num_keys, self._num_keys), strict=True)
        )
        outputs = [
            bucket.attend(q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
            for bucket, q, k, v in zip(self.buckets, query_parts, key_parts, value_parts, strict=True)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._outputs(output.to(dtype))


class _Bucket:
    """Like segments side by side, all padded to one number of queries and one of keys.

    Attributes:
        queries: [segments, longest], the token at each place; padding repeats the last one.
        is_real: [segments, longest], false on padding.
        keys: [segments, longest prefix + longest], the token at each place; padding repeats one of the segment's own.
        has_key: the same shape, false on padding.
    """

    def __init__(
        self, starts: list[int], lengths: list[int], prefixes: list[tuple[int, int]], device: torch.device
    ) -> None:
        start, length = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        first, prefix = (torch.tensor(column)[:, None] for column in zip(*prefixes, strict=True))
        self.longest, self.longest_prefix = max(lengths), int(prefix.max())
        own = torch.arange(self.longest)
        self.is_real = own < length
        self.queries = start + own.minimum(length - 1)
        back = torch.arange(self.longest_prefix, 0, -1)
        in_prefix = back <= prefix
        of_prefix = torch.where(in_prefix, first + prefix - back, start)
        self.keys = torch.cat([of_prefix, self.queries], 1)
        self.has_key = torch.cat([in_prefix, self.is_real], 1)
        # Where the prefixes have one length, the mask is that of every segment.
        self._in_prefix = None if bool(in_prefix.all()) else in_prefix.to(device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [segments * longest, query_heads, head_dim], keys and values likewise -> [segments * longest, heads, dim]."""
        query, key, value = (x.unflatten(0, (len(self.queries), -1)).transpose(1, 2) for x in (query, key, value))
        if self.longest_prefix == 0:
            output = causal_attention(
                query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
            )
        elif softcap is not None:
            visible = self._visible(sliding_window, query.device)
            output = softcapped_attention(query, key, value, visible, scaling=scaling, softcap=softcap)
        else:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=self._visible(sliding_window, query.device),
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.transpose(1, 2).flatten(0, 1)

    def _visible(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """bool [segments or 1, 1, longest, longest prefix + longest]."""
        if sliding_window not in self._masks:
            query = torch.arange(self.longest, device=device)[:, None] + self.longest_prefix
            distance = query - torch.arange(self.longest_prefix + self.longest, device=device)
            visible = (distance >= 0) & (distance < (sliding_window or distance.shape[1]))
            visible = visible[None, None]
            if self._in_prefix is not None:
                own = self._in_prefix.new_ones(len(self._in_prefix), self.longest)
                visible = visible & torch.cat([self._in_prefix, own], 1)[:, None, None]
            self._masks[sliding_window] = visible
        return self._masks[sliding_window]
