"""What packing needs of a batch, on the CPU: which rows there are, how long they are, and what they share."""

from typing import Any

import torch

from burnish.engine import out_of_memory
from burnish.engine.micro_batches import split_rows
from burnish.model.packing import Packed, pack, row_sizes
from burnish.protocol import DataProto
from burnish.utils.seqlen_balancing import sharing_pays


class Rows:
    """CPU copies of what packing needs of a batch, made once for all its micro-batches.

    Args:
        share_prompts: as the engine's.
    """

    def __init__(self, batch: DataProto, share_prompts: bool | None) -> None:
        assert batch.batch is not None
        attention_mask = batch.batch["attention_mask"].cpu().bool()
        self.response_width = batch.batch["responses"].shape[1]
        if "response_mask" in set(batch.batch.keys()):
            self.label_mask = batch.batch["response_mask"].cpu().bool()
        else:
            self.label_mask = attention_mask[:, attention_mask.shape[1] - self.response_width :]
        # Prompts are padded to the longest that the data may have, which is often much longer than any of a batch.
        used = attention_mask[:, : attention_mask.shape[1] - self.response_width].any(0).nonzero()
        first = int(used[0]) if len(used) else 0
        self.attention_mask = attention_mask[:, first:]
        self.input_ids = batch.batch["input_ids"][:, first:].cpu()
        self.sizes = row_sizes(self.input_ids, self.attention_mask, self.label_mask)
        self.lengths = self.sizes.lengths
        if share_prompts is None:
            share_prompts = sharing_pays(sum(self.lengths), self.sizes.shared_tokens)
        self._prompts = self.sizes.prompts if share_prompts else None
        uids = batch.non_tensor_batch.get("uid")
        self._uids = None if uids is None else list(uids)

    def __len__(self) -> int:
        return len(self.lengths)

    def describe(self, indices: list[int], current: out_of_memory.MicroBatch, num_sharing: int) -> None:
        """Notes that the rows ``indices`` go through the model now, on ``num_sharing`` ranks that share their tokens."""
        longest = max((self.lengths[row] for row in indices), default=0)
        current.num_rows = len(indices)
        current.num_tokens, current.longest = -(-self.num_tokens(indices) // num_sharing), -(-longest // num_sharing)

    def num_tokens(self, indices: list[int]) -> int:
        """Tokens that the rows ``indices`` compute together."""
        return self.sizes.num_tokens(indices, shared=self._prompts is not None)

    def split(self, **how: Any) -> list[list[int]]:
        """Row indices of each micro-batch; see `split_rows`."""
        return split_rows(
            self.lengths, prompts=self._prompts, prompt_lengths=self.sizes.prompt_lengths, names=self._uids, **how
        )

    def pack(self, indices: list[int], device: torch.device) -> Packed:
        """The rows ``indices`` as one packed row."""
        index = torch.tensor(indices, dtype=torch.int64)
        prompts = None if self._prompts is None else [self._prompts[row] for row in indices]
        return pack(self.input_ids[index], self.attention_mask[index], self.label_mask[index], device, prompts=prompts)
