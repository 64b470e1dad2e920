"""Attention of every Hugging Face model, replaced by ours.

A model that was loaded by ``burnish.model.load`` calls `burnish_attention` in each layer. What attention *does* there is
decided by the ``attention_context`` keyword of the model's call: packed training, prefill and decoding are three contexts
on the same weights. The context is an argument and never a global, because a checkpointed layer is recomputed later, on
autograd's thread, when a global would already belong to another batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from burnish.utils.errors import ModelError

ATTENTION_NAME = "burnish"

# torch 2.11 takes fewer key than query heads as they are; later ones want to be told.
_GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@runtime_checkable
class AttentionContext(Protocol):
    """How one model call attends. Implementations hold lengths, indices and caches of that call."""

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
        """Attention of one layer.

        Args:
            module: the layer's attention module; ``module.layer_idx`` identifies the layer.
            query: [batch, query_heads, tokens, head_dim], after rotary embedding.
            key: [batch, key_value_heads, tokens, head_dim], after rotary embedding, heads not expanded.
            value: [batch, key_value_heads, tokens, value_dim].
            scaling: factor of the scores.
            sliding_window: number of keys a query sees, itself included; None is all.
            softcap: c of ``c * tanh(scores / c)``, applied before the mask; None is none.

        Returns:
            [batch, tokens, query_heads, value_dim].
        """
        ...


def burnish_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_context: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; dropout is ignored, see `burnish.model.load`.

    Raises:
        ModelError: the model was called without ``attention_context``, or needs what no context can do (sinks).
    """
    if attention_context is None:
        raise ModelError(
            f"{type(module).__name__} was called without attention_context. A model loaded by burnish attends through a "
            "context, passed as attention_context=... in the model's call; for a plain call use "
            "`with burnish.model.attention.plain_attention(model):`."
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which burnish does not compute.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attention_context.attend(
        module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )
    return output, None


# No mask function is registered on purpose: transformers then builds no mask at all for this attention.
AttentionInterface.register(ATTENTION_NAME, burnish_attention)


@contextmanager
def plain_attention(model: PreTrainedModel, implementation: str = "eager") -> Iterator[PreTrainedModel]:
    """Inside the block ``model`` attends as transformers does by itself, so that ``generate`` and padding masks work.

    The weights are the same tensors. ``eager`` is exact for every family; ``sdpa`` is faster and has no soft-cap.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


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


def has_varlen_kernel(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether `varlen_attention` computes this: half precision on a GPU, equal head sizes up to 256, no soft-cap."""
    return (
        query.is_cuda
        and softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of packed segments; the last query of a segment is the place of its last key.

    Args:
        query: [queries, query_heads, head_dim]; key and value: [keys, key_value_heads, head_dim].
        ends: int32 [segments + 1] each, where the segments' queries and keys begin and end.
        longest: the most queries and the most keys of a segment.

    Returns:
        [queries, query_heads, head_dim].
    """
    # The kernel counts keys to the left of the query, transformers counts the query itself too.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    grouped = _GROUPED_HEADS if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(query, key, value, *ends, *longest, scale=scaling, window_size=window, **grouped)
    assert isinstance(output, Tensor)
    return output


class _Place(torch.autograd.Function):
    """Rows of ``x`` written to distinct places of a zero tensor; the backward reads them back (no atomic adds)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, num_places: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros((num_places, *x.shape[1:])).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _Take(torch.autograd.Function):
    """Rows read from distinct places of ``x``: the inverse of `_Place`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_places, *grad.shape[1:])).index_copy_(0, places, grad), None


class PackedContext:
    """Causal attention inside each segment of one packed row, for training and for log-prob passes.

    Attributes:
        lengths: tokens of each segment, in packed order, none of them zero.
        cu_seqlens: [segments + 1] int32, where segments begin and end.
        max_seqlen: the longest segment.
    """

    # A bucket of segments is padded to its longest; a segment shorter than this share of it opens the next bucket.
    MIN_FILL = 0.6

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"A packed row needs segments of at least one token; got lengths {list(lengths)}.")
        self.lengths = list(lengths)
        self.max_seqlen = max(lengths)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._starts = starts
        self._device = torch.device(device)
        self.cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        self._buckets: list[_Bucket] | None = None

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
        """Attention of one packed row: query [1, query_heads, tokens, head_dim] -> [1, tokens, query_heads, value_dim]."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend_tokens(
            query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        ).unsqueeze(0)

    def attend_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [tokens, query_heads, head_dim], key and value with key_value_heads -> [tokens, query_heads, value_dim]."""
        if has_varlen_kernel(query, value, softcap):
            ends, longest = (self.cu_seqlens, self.cu_seqlens), (self.max_seqlen, self.max_seqlen)
            return varlen_attention(query, key, value, ends, longest, scaling=scaling, sliding_window=sliding_window)
        output = query.new_empty(0)
        for bucket in self.buckets:
            attended = bucket.attend(query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
            if len(self.buckets) == 1:
                output = attended
            else:
                whole = _Place.apply(attended, bucket.tokens, query.shape[0])
                output = whole if output.numel() == 0 else output + whole
        return output

    @property
    def buckets(self) -> "list[_Bucket]":
        """Segments of like length, padded together; built at the first use and shared by all layers."""
        if self._buckets is None:
            order = sorted(range(len(self.lengths)), key=lambda segment: -self.lengths[segment])
            groups: list[list[int]] = []
            for segment in order:
                if groups and self.lengths[segment] >= self.MIN_FILL * self.lengths[groups[-1][0]]:
                    groups[-1].append(segment)
                else:
                    groups.append([segment])
            self._buckets = [
                _Bucket(
                    [self._starts[s] for s in sorted(group)], [self.lengths[s] for s in sorted(group)], self._device
                )
                for group in groups
            ]
        return self._buckets


class _Bucket:
    """Segments padded to the longest of them: [segments * longest] places, right-padded, so causality hides the padding."""

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device) -> None:
        self.num_segments, self.longest = len(lengths), max(lengths)
        length = torch.tensor(lengths)
        segment = torch.repeat_interleave(torch.arange(len(lengths)), length)
        offset = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
        self.tokens = (torch.tensor(starts)[segment] + offset).to(device)
        self.places = (segment * self.longest + offset).to(device)
        self.is_dense = min(lengths) == self.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """[tokens of the row, heads, dim] -> [tokens of the bucket, query_heads, value_dim]."""
        padded = causal_attention(*(self._pad(x) for x in (query, key, value)), **how)
        flat = padded.transpose(1, 2).flatten(0, 1)
        return flat if self.is_dense else _Take.apply(flat, self.places)

    def _pad(self, x: Tensor) -> Tensor:
        if x.shape[0] != len(self.tokens):
            x = _Take.apply(x, self.tokens)
        if not self.is_dense:
            x = _Place.apply(x, self.places, self.num_segments * self.longest)
        return x.unflatten(0, (self.num_segments, self.longest)).transpose(1, 2)
