"""What is known about a batch key: who adds it, what it means and how it is padded."""

from dataclasses import dataclass
from typing import Literal

import torch

PAD_TOKEN = "pad_token_id"
"""Stands, as a pad value, for ``meta_info["pad_token_id"]`` (0 where a batch does not tell)."""

PadSide = Literal["left", "right", "prompt_response"]


@dataclass(frozen=True)
class BatchKey:
    """One row of the batch-key table.

    Attributes:
        stage: the stage that adds the key first: prompts, rollout, reward, log_probs, values, advantages or updates.
        pad: where the second dimension grows when batches of different widths meet. ``left`` is as wide as the longest
            prompt, ``right`` as the longest response; ``prompt_response`` is a left-padded prompt, followed by a
            right-padded response as soon as the batch holds responses. ``None``: a value per row, or no tensor.
        pad_value: what it grows by; :data:`PAD_TOKEN` for token ids.
        when: the condition under which the stage adds it; empty means always.
        meaning: one sentence, with the unit.
        dtype: of the tensor; ``None`` for non-tensor keys (object arrays).
    """

    stage: str
    pad: PadSide | None
    pad_value: bool | int | float | str
    when: str
    meaning: str
    dtype: torch.dtype | None = None
