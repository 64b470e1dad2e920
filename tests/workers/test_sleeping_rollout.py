"""An engine with a copy of its own sleeps between uses, and never samples from weights that it forgot."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from burnish.model.load import build_causal_lm
from burnish.rollout.native.engine import NativeRollout
from burnish.utils.errors import RolloutError
from burnish.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.workers.test_actor import prompts, worker_of

OWN = "rollout.name=tests.workers.test_sleeping_rollout:Forgetful"
LORA = ("model.lora_rank=3", "model.target_modules=[q_proj,down_proj]")


class Forgetful(NativeRollout):
    """An engine with a model of its own that forgets its weights at sleep level 2."""

    def __init__(self, policy: Any, config: Any, device: Any) -> None:
        from burnish.model.lora import add_same_adapters

        model = build_causal_lm(policy.module.model.config, policy.dtype)
        add_same_adapters(model, policy.module.model)
        super().__init__(model, config.rollout, shares_storage=False, device=device)
        self.own, self.lost_weights, self.calls = model, False, []  # type: ignore[var-annotated]

    @classmethod
    def for_policy(cls, policy: Any, config: Any, device: Any, tokenizer: Any = None) -> "Forgetful":
        return cls(policy, config, device)

    def update_weights(self, stream: Any, version: int) -> None:
        super().update_weights(stream, version)
        self.calls.append("update")
        self.lost_weights = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        assert not self.lost_weights
        self.calls.append("generate")
        return super().generate(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        self.calls.append(f"sleep {level}")
        if level == 2:
            self.lost_weights = True
            with torch.no_grad():
                for parameter in self.own.parameters():
                    parameter.zero_()


def calls(worker: ActorRolloutRefWorker) -> Sequence[str]:
    assert isinstance(worker.rollout, Forgetful)
    return worker.rollout.calls


def test_weights_are_sent_once_a_step_and_again_where_it_generates_twice(tiny_model_path: str) -> None:
    worker, native = worker_of(tiny_model_path, OWN), worker_of(tiny_model_path)
    assert calls(worker) == ["update", "sleep 2"]
    worker.update_weights(1)
    first, second = worker.generate_sequences(prompts()), worker.generate_sequences(prompts())
    assert calls(worker)[2:] == ["update", "generate", "sleep 2", "update", "generate", "sleep 2"]
    expected = native.generate_sequences(prompts()).tensors["responses"]
    assert torch.equal(first.tensors["responses"], expected)
    assert torch.equal(second.tensors["responses"], expected)


def test_the_frozen_base_of_adapters_stays(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, OWN, *LORA)
    worker.update_weights(1)
    worker.generate_sequences(prompts())
    worker.generate_sequences(prompts())
    assert calls(worker) == ["update", "sleep 1", "update", "generate", "sleep 1", "generate", "sleep 1"]


def test_it_stays_awake_where_that_is_asked_for(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, OWN, "rollout.free_cache_engine=false")
    worker.generate_sequences(prompts())
    assert calls(worker) == ["update", "generate"]


def test_an_engine_that_answers_for_nothing_is_found_out(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forgetful, "weights_checksum", lambda self: {})
    with pytest.raises(RolloutError, match="holds nothing of that name"):
        worker_of(tiny_model_path, OWN)
