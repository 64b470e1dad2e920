"""The model's two calls: prefill some prompts, decode one token of every running sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.rollout.native.cache import SlotCache
from burnish.rollout.native.contexts import DecodeContext, PrefillContext
from burnish.rollout.native.scheduler import Move, PromptGroup


class ModelRunner:
    """Runs a model that `burnish.model.load` prepared, and owns its key-value cache."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.cache = SlotCache()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Without gradients and dropout; each module's training flag is put back afterwards.

        Not ``inference_mode``: tensors that a module makes and keeps must stay usable in training.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def prefill(self, groups: Sequence[PromptGroup]) -> Tensor:
        """Fills the groups' slots with their prompts.

        Returns:
            [groups, vocab], the logits after each prompt.
        """
        ids = [token for group in groups for token in group.prompt_ids]
        positions = [position for group in groups for position in range(len(group.prompt_ids))]
        self.cache.reserve(
            1 + max(slot for group in groups for slot in group.slots), max(len(group.prompt_ids) for group in groups)
        )
        context = PrefillContext(self.cache, groups, self.device)
        output = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            attention_context=context,
            use_cache=False,
            logits_to_keep=context.last_tokens,
        )
        return output.logits[0]

    def decode(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Appends ``tokens[i]`` to slot i.

        Args:
            tokens, lengths: int64 [rows], the newest token of each of the first slots, and how many the slot holds
                without it.
            longest: the largest of ``lengths``.

        Returns:
            [rows, vocab], the logits after the token.
        """
        self.cache.reserve(tokens.shape[0], longest + 1)
        output = self.model(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            attention_context=DecodeContext(self.cache, lengths, longest + 1),
            use_cache=False,
        )
        return output.logits[:, 0]

    def move(self, moves: Sequence[Move], longest: int) -> None:
        """Sequences change their slots; none holds more than ``longest`` tokens."""
        self.cache.move(moves, longest)
