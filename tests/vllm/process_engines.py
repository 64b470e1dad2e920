"""vLLM engines in processes of their own for tests: two of them, which all rollouts of a module share.

To start one takes long, so a rollout is not an engine here but the right to one: before it generates, it fills the engine with
its own weights if another rollout has been there since.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse, SamplingParams, WeightStream
from burnish.rollout.vllm.arguments import VLLMModel, engine_arguments, engine_environment
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.process import ProcessCore
from burnish.rollout.vllm.standalone import StandaloneRollout
from tests.rollout.sampling_contract import letter_tokenizer
from tests.vllm.in_process_engines import tiny_vllm_llama

FEW, MANY = 2, 64
"""``max_num_seqs`` of the two engines."""


def start_core(
    folder: str, max_num_seqs: int = MANY, model: PreTrainedModel | None = None, num_workers: int = 1
) -> ProcessCore:
    """An engine of its own, with the weights of `tiny_vllm_llama`, which ``folder`` will hold.

    Args:
        num_workers: tensor-parallel ones.
    """
    described = describe(folder, model)
    config = RolloutConfig(
        mode="async", load_format="auto", max_num_seqs=max_num_seqs, tensor_model_parallel_size=num_workers
    )
    arguments = engine_arguments(described, config, torch.device("cpu"), in_process=False)
    bound = num_workers == 1 and "VLLM_CPU_OMP_THREADS_BIND" in os.environ
    environment = engine_environment(in_process=False) | ({} if bound else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    return ProcessCore(arguments, environment, tokenizer=letter_tokenizer())


def describe(folder: str, model: PreTrainedModel | None = None) -> VLLMModel:
    """The model in ``folder``, which is written if it is not there."""
    if model is None:
        model = tiny_vllm_llama()
    if not os.path.exists(os.path.join(folder, "config.json")):
        model.save_pretrained(folder)
    return VLLMModel(path=folder, config=model.config, dtype=torch.float32)


class SharedRollout(VLLMRollout):
    """A rollout on an engine that others use in between."""

    owners: ClassVar[weakref.WeakKeyDictionary[ProcessCore, SharedRollout]] = weakref.WeakKeyDictionary()
    _kept: Sequence[tuple[str, Tensor]] = ()

    def update_weights(self, stream: WeightStream, version: int) -> None:
        kept: list[tuple[str, Tensor]] = []

        def keeping() -> WeightStream:
            for name, tensor in stream:
                kept.append((name, tensor.detach().clone()))
                yield name, tensor

        self.owners[self._core] = self
        super().update_weights(keeping(), version)
        self._kept = kept

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        if self.owners.get(self._core) is not self:
            self._core.send(iter(self._kept), 1 << 20, self.policy_version)
            self.owners[self._core] = self
        return super().generate(requests, sampling, on_finished)


class ProcessEngines:
    """The two engines, each started when it is first asked for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        self._cores: dict[int, ProcessCore] = {}

    def core(self, max_num_seqs: int = MANY) -> ProcessCore:
        """The engine for so many sequences at once."""
        size = FEW if max_num_seqs <= 5 else MANY
        if size in self._cores and not self._cores[size].lives:
            self._cores.pop(size).close()
        if size not in self._cores:
            self._cores[size] = start_core(self._folder.name, size)
        return self._cores[size]

    def rollout(self, model: PreTrainedModel, tokenizer: Tokenizer | None = None, **config: Any) -> VLLMRollout:
        """A rollout with the weights of ``model``."""
        settings = RolloutConfig(mode="async", **config)
        rollout = SharedRollout(
            describe(self._folder.name), settings, tokenizer=tokenizer, core=self.core(settings.max_num_seqs)
        )
        rollout.update_weights(model.named_parameters(), version=0)
        return rollout

    def close(self) -> None:
        """Ends both."""
        for core in self._cores.values():
            core.close()
        self._folder.cleanup()


def make_standalone(folder: str) -> StandaloneRollout:
    """In the process of a standalone engine: one that lives in that process."""
    described, config = describe(folder), RolloutConfig(mode="sync", load_format="auto", max_num_seqs=MANY)
    return StandaloneRollout(described, config, tokenizer=letter_tokenizer())
