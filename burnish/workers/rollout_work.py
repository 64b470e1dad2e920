"""How much a rollout has done, beside what its device could do in the same time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burnish.model.bandwidth import device_bandwidth
from burnish.model.flops import FlopsCounter, device_peak_flops
from burnish.rollout import RolloutRequest, RolloutResponse
from burnish.rollout.stats import RolloutStats


class RolloutWork:
    """Counts the operations of tokens and the bytes that decoding has to read.

    Args:
        counter: of the policy.
        model_config: the model's; it says how many keys and values a token has.
        dtype: that the rollout computes in.
        device: of this rank.
        num_ranks: ranks that make up one engine and share its work.
    """

    def __init__(
        self, counter: FlopsCounter, model_config: object, dtype: torch.dtype, device: torch.device, num_ranks: int
    ) -> None:
        self._counter = counter
        self._dtype = dtype
        self._device = device
        self._num_ranks = num_ranks
        # A weight costs two operations a token. Of a mixture's experts only those that a token goes through count.
        self._weight_bytes = counter.flops(1, 0, 1) / 2 * dtype.itemsize
        self._token_bytes = _cached_numbers(model_config) * dtype.itemsize

    def of(
        self, requests: Sequence[RolloutRequest], responses: Sequence[RolloutResponse], stats: RolloutStats
    ) -> RolloutStats:
        """The ideal seconds of a call of ``generate`` whose own numbers are ``stats``; nothing where the engine does not count
        its steps, as a server elsewhere does not."""
        if not stats.num_steps:
            return RolloutStats()
        prompts = [len(request.prompt_ids) for request in requests]
        lengths = [len(response.token_ids) for response in responses]
        # A response's i-th token looks at the prompt and at i tokens.
        read = sum(n * p + n * (n + 1) / 2 for p, n in zip(prompts, lengths, strict=True))
        prefilled = stats.num_prefilled_tokens
        pairs = read + prefilled * sum(prompts) / max(1, len(prompts)) / 2
        operations = self._counter.flops(prefilled + sum(lengths), pairs, sum(lengths))
        traffic = stats.num_steps * self._weight_bytes + read * self._token_bytes
        return RolloutStats(
            operation_seconds=operations / device_peak_flops(self._device, self._dtype) / self._num_ranks,
            traffic_seconds=traffic / device_bandwidth(self._device) / self._num_ranks,
        )


def _cached_numbers(model_config: object) -> int:
    """Numbers that a token leaves in the key-value cache."""
    config = model_config.get_text_config()  # type: ignore[attr-defined]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * head_dim * config.num_hidden_layers
