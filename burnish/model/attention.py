"""Attention of every Hugging Face model, replaced by ours.

A model that was loaded by ``burnish.model.load`` calls `burnish_attention` in each layer. What attention *does* there is
decided by the ``attention_context`` keyword of the model's call: packed training, prefill and decoding are three contexts
on the same weights. The context is an argument and never a global, because a checkpointed layer is recomputed later, on
autograd's thread, when a global would already belong to another batch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from burnish.model.gathering import Gathering, to_device
from burnish.model.padded_attention import Padding, prefers_dense
from burnish.utils.errors import ModelError

logger = logging.getLogger("burnish.model")

ATTENTION_NAME = "burnish"

# torch 2.11 takes fewer key than query heads as they are; later ones want to be told.
_GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_FLASH = torch.ops.aten._flash_attention_forward.default
_FLASH_ARGUMENTS = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
_FLASH_ARGUMENTS += ["dropout_p", "is_causal", "return_debug_mask"]
_FLASH_OPTIONS = {"scale", "window_size_left", "window_size_right"}


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


def has_varlen_kernel(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether `varlen_attention` computes this: half precision on a GPU, equal head sizes up to 256, no soft-cap."""
    return (
        query.is_cuda
        and softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
    )


@cache
def has_flash_attn() -> bool:
    """Whether there is the package flash-attn with soft-caps: torch's own kernel of packed segments has none."""
    if find_spec("flash_attn") is None:
        return False
    try:
        return "softcap" in signature(import_module("flash_attn").flash_attn_varlen_func).parameters
    except (ImportError, AttributeError) as error:
        # It is built for one release of torch and often left behind by the next.
        logger.warning(
            "flash-attn is installed but cannot be used, so attention with a soft-cap takes padded rows: %s", error
        )
        return False


@cache
def knows_flash_operator() -> bool:
    """Whether torch's operator below ``varlen_attn`` is called as `varlen_attention` calls it.

    The public function reaches it through operators written in Python, which take the host half a millisecond in each
    direction and layer: a third of what a small model's layer takes in all.
    """
    arguments = [(argument.name, argument.kwarg_only) for argument in _FLASH._schema.arguments]
    positional = [name for name, is_option in arguments if not is_option]
    return positional == _FLASH_ARGUMENTS and {name for name, is_option in arguments if is_option} >= _FLASH_OPTIONS


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of packed segments; the last query of a segment is the place of its last key.

    Args:
        query: [queries, query_heads, head_dim]; key and value: [keys, key_value_heads, head_dim].
        ends: int32 [segments + 1] each, where the segments' queries and keys begin and end.
        longest: the most queries and the most keys of a segment.
        softcap: only where `has_flash_attn`, whose kernel it takes.

    Returns:
        [queries, query_heads, head_dim].
    """
    # The kernel counts keys to the left of the query, transformers counts the query itself too.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    if softcap is not None:
        flash = import_module("flash_attn").flash_attn_varlen_func
        output = flash(
            query, key, value, *ends, *longest, softmax_scale=scaling, causal=True, window_size=window, softcap=softcap
        )
        assert isinstance(output, Tensor)
        return output
    if knows_flash_operator():
        left, right = window
        flashed: Tensor = _FLASH(
            query, key, value, *ends, *longest, 0.0, window == (-1, 0), False,
            scale=scaling, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return flashed
    grouped = _GROUPED_HEADS if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(query, key, value, *ends, *longest, scale=scaling, window_size=window, **grouped)
    assert isinstance(output, Tensor)
    return output


class PackedContext:
    """Causal attention inside each segment of one packed row, for training and for log-prob passes.

    A segment may continue another one, as the responses of a group continue their prompt, which is there once: its tokens
    see all tokens of that prefix before their own.

    Args:
        lengths: tokens of each segment, in packed order, none of them zero.
        device: where the row is.
        prefixes: for each segment the first token and the number of tokens of what it continues, (0, 0) for nothing; None:
            no segment continues anything. A prefix continues nothing itself.

    Attributes:
        lengths: as given.
        cu_seqlens: [segments + 1] int32, where segments begin and end.
        max_seqlen: the longest segment.
        prefixes: as given, (0, 0) for None.
        has_prefixes: whether a segment continues another one.
        is_dense: whether the segments are equally long, and none continues another one.
        num_pairs: pairs of a query and a key that it sees, without regard to sliding windows.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        prefixes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"A packed row needs segments of at least one token; got lengths {list(lengths)}.")
        self.lengths = list(lengths)
        self.prefixes = [(0, 0)] * len(lengths) if prefixes is None else list(prefixes)
        self.max_seqlen = max(lengths)
        sizes, seen = np.asarray(self.lengths), np.asarray(self.prefixes)[:, 1]
        self.num_pairs = int((sizes * seen + sizes * (sizes + 1) // 2).sum())
        self._device = torch.device(device)
        self._ends = [0, *accumulate(self.lengths)]
        (ends,) = to_device([torch.tensor(self._ends)], device)
        self.cu_seqlens = ends.to(torch.int32)
        self.has_prefixes = any(prefix for _, prefix in self.prefixes)
        self.is_dense = not self.has_prefixes and min(lengths) == max(lengths)
        self._keys: _Keys | None = None
        self._padding: Padding | None = None

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
        how: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        if not has_varlen_kernel(query, value, None) or (softcap is not None and not has_flash_attn()):
            return self.padding.attend(query, key, value, **how)
        if self.is_dense and softcap is None and not sliding_window and prefers_dense(query):
            return self.padding.attend(query, key, value, **how)
        ends, longest = (self.cu_seqlens, self.cu_seqlens), (self.max_seqlen, self.max_seqlen)
        if self.has_prefixes:
            keys = self.keys
            key, value = keys.gather(key), keys.gather(value)
            ends, longest = (self.cu_seqlens, keys.cu_seqlens), (self.max_seqlen, keys.max_seqlen)
        return varlen_attention(query, key, value, ends, longest, **how)

    @property
    def keys(self) -> "_Keys":
        """Which keys each segment sees, one segment after the other; made at the first use and shared by all layers."""
        if self._keys is None:
            self._keys = _Keys(self.lengths, self._ends, self.prefixes, self._device)
        return self._keys

    @property
    def padding(self) -> Padding:
        """Segments padded in buckets of like ones; made at the first use and shared by all layers."""
        if self._padding is None:
            self._padding = Padding(self.lengths, self._ends, self.prefixes, self._device)
        return self._padding


class _Keys:
    """The keys of each segment, its prefix and then its own, one segment after the other: what the kernel reads."""

    def __init__(
        self, lengths: list[int], starts: list[int], prefixes: list[tuple[int, int]], device: torch.device
    ) -> None:
        # Two stretches for each segment, its prefix and itself: where they begin, and how long they are.
        own = np.stack([np.asarray(starts[:-1]), np.asarray(lengths)], 1)
        begins, sizes = np.stack([np.asarray(prefixes), own], 1).reshape(-1, 2).T
        ends = sizes.cumsum()
        index = np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1])
        self.gather = Gathering(torch.from_numpy(index), starts[-1], device=device)
        cu_seqlens = torch.from_numpy(np.concatenate([[0], ends[1::2]]))
        self.cu_seqlens = to_device([cu_seqlens], device)[0].to(torch.int32)
        self.max_seqlen = int(sizes.reshape(-1, 2).sum(1).max())
