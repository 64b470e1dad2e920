"""The model's two calls: prefill some prompts, decode one token of every running sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.model.attention import AttentionContext
from burnish.model.head import head_logits, logit_transform
from burnish.model.policy import backbone_of
from burnish.rollout.native.cache import SlotCache
from burnish.rollout.native.contexts import DecodeContext, PrefillContext
from burnish.rollout.native.scheduler import Move, PromptGroup


class ModelRunner:
    """Runs a model that `burnish.model.load` prepared, and owns its key-value cache."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.cache = SlotCache()
        self._transform = logit_transform(model.config)

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
            [groups, vocab], the logits after each prompt, in at least float32.
        """
        ids = [token for group in groups for token in group.prompt_ids]
        positions = [position for group in groups for position in range(len(group.prompt_ids))]
        self.cache.reserve(
            1 + max(slot for group in groups for slot in group.slots), max(len(group.prompt_ids) for group in groups)
        )
        context = PrefillContext(self.cache, groups, self.device)
        hidden = self._hidden_states(
            torch.tensor([ids], device=self.device), torch.tensor([positions], device=self.device), context
        )
        return self._logits(hidden[0, context.last_tokens])

    def decode(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Appends ``tokens[i]`` to slot i.

        Args:
            tokens, lengths: int64 [rows], the newest token of each of the first slots, and how many the slot holds
                without it.
            longest: the largest of ``lengths``.

        Returns:
            [rows, vocab], the logits after the token, in at least float32.
        """
        self.cache.reserve(tokens.shape[0], longest + 1)
        context = DecodeContext(self.cache, lengths, longest + 1)
        return self._logits(self._hidden_states(tokens[:, None], lengths[:, None], context)[:, 0])

    def move(self, moves: Sequence[Move], longest: int) -> None:
        """Sequences change their slots; none holds more than ``longest`` tokens."""
        self.cache.move(moves, longest)

    def _hidden_states(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """[rows, tokens, hidden] of ids and positions [rows, tokens]."""
        output = backbone_of(self.model)(
            input_ids=input_ids, position_ids=position_ids, attention_context=context, use_cache=False
        )
        return output[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of states [rows, hidden], by the head that training uses.

        The model's own head would round them to its dtype: in bf16 by up to 0.06 for a logit of 20, on every token that
        is then compared with its log-prob in training.
        """
        head = self.model.get_output_embeddings()
        return head_logits(hidden, head.weight, getattr(head, "bias", None), self._transform)  # type: ignore[arg-type, union-attr]
