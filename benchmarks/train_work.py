"""The rows that the training benchmark trains on; read by its peer too, so torch is all that is imported."""

from dataclasses import dataclass
from typing import Any

import torch

SIGMA = 0.6
CAP = 3.0


@dataclass(frozen=True, kw_only=True)
class TrainWork:
    """Rows of random tokens, one update of all of them.

    Attributes:
        tokens: of all rows, prompts included.
        row: tokens of a row, or with ``log_normal`` their mean.
        prompt: tokens of a row that are its prompt.
        samples: rows that share a prompt.
        log_normal: response lengths are drawn log-normal (sigma `SIGMA`), at most `CAP` times their median.
    """

    tokens: int
    row: int
    prompt: int
    samples: int = 1
    log_normal: bool = False

    def describe(self) -> str:
        """For people."""
        response = self.row - self.prompt
        lengths = f"log-normal around {response}" if self.log_normal else str(response)
        shared = f", {self.samples} rows a prompt" if self.samples > 1 else ""
        return f"{self.tokens} tokens in rows of {self.prompt} + {lengths}{shared}"

    def response_lengths(self) -> list[int]:
        """Of each row; all rows together have ``tokens`` tokens."""
        mean = self.row - self.prompt
        lengths: list[int] = []
        left = self.tokens
        generator = torch.Generator().manual_seed(0)
        # exp(mu + sigma x) has the mean exp(mu + sigma^2 / 2).
        median = mean / torch.tensor(SIGMA**2 / 2).exp().item()
        while left > self.prompt:
            length = mean
            if self.log_normal:
                drawn = median * (SIGMA * torch.randn(1, generator=generator)).exp().item()
                length = max(1, round(min(drawn, CAP * median)))
            rest = left - self.prompt
            # What is too short for another row goes to this one.
            lengths.append(length if rest - length > self.prompt else rest)
            left = rest - lengths[-1]
        return lengths

    def tensors(self, vocab_size: int) -> dict[str, Any]:
        """A batch as the trainer makes it: [rows, prompt + longest response], with ``advantages`` and ``loss_mask``."""
        lengths = self.response_lengths()
        generator = torch.Generator().manual_seed(1)
        rows, longest = len(lengths), max(lengths)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(3, vocab_size, shape, generator=generator)

        prompts = draw(-(-rows // self.samples), self.prompt).repeat_interleave(self.samples, 0)[:rows]
        input_ids = torch.cat([prompts, draw(rows, longest)], 1)
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        whole = torch.cat([torch.ones_like(prompts, dtype=torch.bool), mask], 1)
        return {
            "input_ids": torch.where(whole, input_ids, 0),
            "attention_mask": whole.long(),
            "position_ids": whole.long().cumsum(1) - 1,
            "responses": torch.where(mask, input_ids[:, self.prompt :], 0),
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, longest).clone(),
        }
