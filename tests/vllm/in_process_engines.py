"""vLLM engines in this process for tests: started once for each way of starting them, and then handed from test to test.

A test that is given an engine gets the weights of its model by ``update_weights``, which other tests prove to arrive.
"""

import tempfile
import weakref
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.vllm.arguments import VLLMModel, engine_arguments, engine_environment
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.in_process import InProcessCore
from tests.rollout.contract import tiny_llama
from tests.rollout.sampling_contract import letter_tokenizer

# What the size of a head must at least be for vLLM's attention on a CPU.
HEAD_DIM = 32


def tiny_vllm_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """`tiny_llama` in a shape that vLLM runs on a CPU."""
    return tiny_llama(seed, head_dim=HEAD_DIM, **overrides)


class Engines:
    """Cores, each of them free or behind a rollout that somebody still has."""

    def __init__(self) -> None:
        self._free: dict[str, list[InProcessCore]] = {}
        self._all: list[InProcessCore] = []
        self._folder = tempfile.TemporaryDirectory()
        self._model = tiny_vllm_llama()
        self._model.save_pretrained(self._folder.name)

    def rollout(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        **config: Any,
    ) -> VLLMRollout:
        """An engine that nobody else has now, with the weights of ``model``."""
        rollout = self.unsent(tokenizer, engine_kwargs, **config)
        rollout.update_weights(model.named_parameters(), version=0)
        return rollout

    def unsent(
        self, tokenizer: Tokenizer | None = None, engine_kwargs: dict[str, Any] | None = None, **config: Any
    ) -> VLLMRollout:
        """An engine with whatever weights it has."""
        rollout_config = RolloutConfig(mode="sync", load_format="auto", **config)
        rollout_config.engine_kwargs.vllm = engine_kwargs or {}
        described = VLLMModel(path=self._folder.name, config=self._model.config, dtype=torch.float32)
        arguments = engine_arguments(described, rollout_config, torch.device("cpu"), in_process=True)
        free = self._free.setdefault(repr(sorted(arguments.items())), [])
        if free:
            core = free.pop()
        else:
            core = InProcessCore(arguments, engine_environment(in_process=True), letter_tokenizer())
            self._all.append(core)
        rollout = VLLMRollout(described, rollout_config, tokenizer=tokenizer, core=core)
        weakref.finalize(rollout, free.append, core)
        return rollout

    def close(self) -> None:
        """Ends all engines."""
        for core in self._all:
            core.close()
        self._folder.cleanup()
