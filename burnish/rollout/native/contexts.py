"""Prefill and decode as attention contexts: what the model's attention does while it generates."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.model.attention import PackedContext, softcapped_attention
from burnish.rollout.native.cache import SlotCache
from burnish.rollout.native.scheduler import PromptGroup


class PrefillContext:
    """Prompts packed in one row: attends as training does, and stores keys and values in every slot of each group."""

    def __init__(self, cache: SlotCache, groups: Sequence[PromptGroup], device: torch.device) -> None:
        self._cache = cache
        lengths = [len(group.prompt_ids) for group in groups]
        self._packed = PackedContext(lengths, device)
        self.last_tokens = torch.tensor(lengths, device=device).cumsum(0) - 1
        """[groups], where each prompt's last token is in the row."""
        self._source, self._slots, self._positions = self._places(groups, lengths, device)

    def _places(self, groups: Sequence[PromptGroup], lengths: list[int], device: torch.device) -> tuple[Tensor, ...]:
        """Of each stored token (one prompt token goes to several slots): its place in the row, slot, position."""
        group_of_slot = torch.tensor([i for i, group in enumerate(groups) for _ in group.slots], device=device)
        slots = torch.tensor([slot for group in groups for slot in group.slots], device=device)
        group_lengths = torch.tensor(lengths, device=device)
        starts = (group_lengths.cumsum(0) - group_lengths)[group_of_slot]
        slot_lengths = group_lengths[group_of_slot]
        owner = torch.repeat_interleave(slot_lengths)
        positions = torch.arange(owner.shape[0], device=device) - (slot_lengths.cumsum(0) - slot_lengths)[owner]
        return starts[owner] + positions, slots[owner], positions

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
        stored_key, stored_value = (x[0].transpose(0, 1)[self._source] for x in (key, value))
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._cache.store(layer, self._slots, self._positions, stored_key, stored_value)
        return self._packed.attend(
            module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )


class DecodeContext:
    """One new token for each of the first slots: stores its key and value, then attends to the slot's tokens.

    Args:
        lengths: int64 [rows], tokens that each slot holds already.
        longest: the largest of ``lengths``, plus one for the new token.
    """

    def __init__(self, cache: SlotCache, lengths: Tensor, longest: int) -> None:
        self._cache = cache
        self._lengths = lengths
        self._longest = longest
        self._rows = torch.arange(lengths.shape[0], device=lengths.device)
        self._places = torch.arange(longest, device=lengths.device)
        self._visible: dict[int | None, Tensor] = {}
        self._bias: dict[int | None, Tensor] = {}

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
        num_rows, num_heads, _, head_dim = query.shape
        self._cache.store(layer, self._rows, self._lengths, key[:, :, 0], value[:, :, 0])
        keys, values = self._cache.view(layer, num_rows, self._longest)
        # The query heads that share a key head stand as its queries, so that no key is expanded.
        query = query.reshape(num_rows, keys.shape[1], -1, head_dim)
        if softcap is not None:
            visible = self._visible_places(sliding_window)
            output = softcapped_attention(query, keys, values, visible, scaling=scaling, softcap=softcap)
        else:
            bias = self._additive_mask(sliding_window, query.dtype)
            output = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
        return output.reshape(num_rows, 1, num_heads, -1)

    def _visible_places(self, window: int | None) -> Tensor:
        """[rows, 1, 1, longest] bool: not after the new token, and inside the window that ends with it."""
        if window not in self._visible:
            age = self._lengths[:, None] - self._places
            visible = age >= 0 if window is None else (age >= 0) & (age < window)
            self._visible[window] = visible[:, None, None]
        return self._visible[window]

    def _additive_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as a term of the scores; built once, since all layers of one window share it."""
        if window not in self._bias:
            visible = self._visible_places(window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._bias[window] = zeros.masked_fill(~visible, float("-inf"))
        return self._bias[window]
