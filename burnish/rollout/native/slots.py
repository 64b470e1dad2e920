"""The state of running sequences as tensors, one row a slot, so that bookkeeping is done for all rows at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.rollout.base import SamplingParams
from burnish.rollout.native.scheduler import Move


class SlotState:
    """Newest token, lengths, random stream and output of each slot.

    Attributes:
        tokens: int64 [slots], the newest token, not yet in the cache.
        lengths: int64 [slots], tokens in the cache; equally the position of the newest token.
        keys: int64 [slots], the random stream.
        num_generated: int64 [slots], tokens of the response so far.
    """

    def __init__(self, num_slots: int, sampling: SamplingParams, device: torch.device) -> None:
        self.tokens, self.lengths, self.keys, self.num_generated = (
            torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        # A quarter of the longest response to start with: most responses end long before the limit.
        width = min(sampling.max_new_tokens, max(64, sampling.max_new_tokens // 4))
        self._token_ids = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(num_slots, width, dtype=torch.float32, device=device)
        self._stop_ids = torch.tensor(sampling.end_token_ids, dtype=torch.int64, device=device)
        self._max_new_tokens = sampling.max_new_tokens

    def start(self, slots: Tensor, prompt_lengths: Tensor, keys: Tensor) -> None:
        """New sequences, whose prompts are in the cache."""
        self.lengths[slots] = prompt_lengths
        self.keys[slots] = keys
        self.num_generated[slots] = 0

    def append(self, slots: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Adds one token to each of ``slots``.

        Returns:
            Bool [len(slots)] each: ended by a stop token; ended by it or by the length limit.
        """
        places = self.num_generated[slots]
        self._widen(int(places.max()) + 1)
        self._token_ids[slots, places] = tokens
        self._log_probs[slots, places] = log_probs
        self.tokens[slots] = tokens
        self.num_generated[slots] = places + 1
        stopped = torch.isin(tokens, self._stop_ids)
        return stopped, stopped | (places + 1 >= self._max_new_tokens)

    def output(self, slots: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of these slots' responses."""
        counts = self.num_generated[slots].tolist()
        width = max(counts)
        token_ids, log_probs = self._token_ids[slots, :width].tolist(), self._log_probs[slots, :width].tolist()
        return [(ids[:n], values[:n]) for ids, values, n in zip(token_ids, log_probs, counts, strict=True)]

    def move(self, moves: Sequence[Move]) -> None:
        """Sequences change their slots."""
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        for rows in (self.tokens, self.lengths, self.keys, self.num_generated, self._token_ids, self._log_probs):
            rows[targets] = rows[sources]

    def _widen(self, width: int) -> None:
        """Makes room for responses of ``width`` tokens."""
        missing = width - self._token_ids.shape[1]
        if missing > 0:
            missing = min(max(missing, self._token_ids.shape[1]), self._max_new_tokens - self._token_ids.shape[1])
            self._token_ids = torch.nn.functional.pad(self._token_ids, (0, missing))
            self._log_probs = torch.nn.functional.pad(self._log_probs, (0, missing))
