"""The contract of every rollout engine for those of vLLM, wherever it runs: all of it but what is about shared storage."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from burnish.rollout.base import SamplingParams
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_same_responses, make_requests
from tests.rollout.sampling_contract import SamplingContract, letter_tokenizer
from tests.vllm.in_process_engines import tiny_vllm_llama

KEEPS_A_COPY = "vLLM always keeps a copy of the weights"


class VLLMContract(SamplingContract):
    """A subclass sets ``engines`` before each test."""

    engine_cls = VLLMRollout
    engines: Any
    """Lends engines: ``rollout(model, tokenizer=None, **config)``."""

    def tiny(self, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        return tiny_vllm_llama(seed, **overrides)

    def make(self, model: PreTrainedModel | None = None, *, shares_storage: bool = True, **config: Any) -> Any:
        return self.engines.rollout(self.tiny() if model is None else model, **config)

    def make_with_tokenizer(self, **config: Any) -> Any:
        return self.engines.rollout(self.tiny(), letter_tokenizer(), **config)

    @pytest.mark.skip(reason=KEEPS_A_COPY)
    def test_shared_weights_need_no_copy(self) -> None: ...

    @pytest.mark.skip(reason=KEEPS_A_COPY)
    def test_a_stream_of_other_weights_is_refused_where_storage_is_said_to_be_shared(self) -> None: ...

    def test_logits_that_are_no_numbers_are_an_error_that_names_a_request_and_the_engine_survives(self) -> None:
        model, requests = self.tiny(), make_requests()
        engine = self.make(model)
        before = engine.generate(requests, self.sampled)
        broken = self.tiny()
        with torch.no_grad():
            broken.lm_head.weight[3] = float("nan")
        for sampling in (self.sampled, self.truncated, SamplingParams(max_new_tokens=2, temperature=0.0)):
            engine.update_weights(broken.named_parameters(), version=7)
            with pytest.raises(RolloutError, match=r"logits are not finite.*request '\d/\d'.*policy version 7"):
                engine.generate(requests, sampling)
            engine.update_weights(model.named_parameters(), version=8)
            assert_same_responses(engine.generate(requests, self.sampled), before)
