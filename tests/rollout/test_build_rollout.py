"""A rollout stands on the trained weights where it can, and on its own copy otherwise."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config

from burnish.config import ActorRolloutRefConfig, RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule
from burnish.rollout import SamplingParams, build, build_rollout
from burnish.rollout.native.engine import NativeRollout
from tests.rollout.contract import assert_same_responses, make_requests, tiny_llama


@dataclass
class FakePolicy:
    module: SimpleNamespace
    shares_storage: bool
    dtype: torch.dtype = torch.float32


def make_policy(shares_storage: bool) -> FakePolicy:
    return FakePolicy(SimpleNamespace(model=tiny_llama(seed=3)), shares_storage)


SAMPLING = SamplingParams(max_new_tokens=5)


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("shares_storage", [True, False])
def test_it_samples_from_the_policy_either_way(name: str, shares_storage: bool) -> None:
    policy = make_policy(shares_storage)
    rollout = build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig(name=name)), "cpu")
    assert rollout.shares_storage is shares_storage
    rollout.update_weights(policy.module.model.named_parameters(), version=1)
    reference = build_rollout(make_policy(True), ActorRolloutRefConfig(rollout=RolloutConfig(name="native")), "cpu")
    reference.update_weights(iter(()), version=1)  # Nothing to move: an empty stream will do.
    assert_same_responses(rollout.generate(make_requests(), SAMPLING), reference.generate(make_requests(), SAMPLING))


def test_another_dtype_needs_a_copy() -> None:
    policy = make_policy(True)
    rollout = build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig(dtype="bfloat16")), "cpu")
    assert not rollout.shares_storage
    rollout.update_weights(policy.module.model.named_parameters(), version=1)
    responses = rollout.generate(make_requests(), SAMPLING)
    assert all(len(r.token_ids) == 5 and all(value <= 0 for value in r.log_probs) for r in responses)
    assert policy.module.model.dtype == torch.float32


def test_a_copy_has_the_buffers_of_the_trained_model_which_no_stream_brings() -> None:
    policy = make_policy(shares_storage=False)
    policy.module.model.model.rotary_emb.inv_freq.mul_(0.5)
    rollout = build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig(name="native")), "cpu")
    rollout.update_weights(policy.module.model.named_parameters(), version=1)
    on_its_weights = build_rollout(
        FakePolicy(policy.module, shares_storage=True), ActorRolloutRefConfig(rollout=RolloutConfig()), "cpu"
    )
    assert_same_responses(
        rollout.generate(make_requests(), SAMPLING), on_its_weights.generate(make_requests(), SAMPLING)
    )


class LargestOnCPU(TorchDispatchMode):
    """Notes the largest tensor that is made on the CPU inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


def test_a_copy_is_made_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(model: Any, _config: RolloutConfig, **given: Any) -> Any:
        return SimpleNamespace(model=model, **given)

    monkeypatch.setattr(build, "rollout_class", lambda _config: engine)
    policy = make_policy(shares_storage=False)
    smallest = min(p.nbytes for p in policy.module.model.parameters() if p.dim() > 1)
    with LargestOnCPU() as made:
        rollout: Any = build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig()), "meta")
    assert {p.device.type for p in rollout.model.parameters()} == {"meta"}
    assert made.largest < smallest


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
def test_in_bfloat16_log_probs_are_those_of_a_training_forward_on_the_same_weights(trained: str) -> None:
    config = Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        final_logit_softcapping=20.0,
        pad_token_id=0,
    )
    dtype = getattr(torch, trained)
    model = build_causal_lm(config, dtype)
    policy = FakePolicy(SimpleNamespace(model=model), shares_storage=True, dtype=dtype)
    rollout = build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig(dtype="bfloat16")), "cpu")
    assert rollout.shares_storage is (trained == "bfloat16")
    rollout.update_weights(model.named_parameters(), version=1)
    requests = make_requests(3, 2)
    responses = rollout.generate(requests, SamplingParams(max_new_tokens=8, temperature=0.7))
    reference = PolicyModule(build_causal_lm(config).bfloat16())
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        rows = pack(ids, torch.ones_like(ids).bool(), torch.ones(1, len(response.token_ids)).bool())
        expected = reference(rows, temperature=0.7)["log_probs"][0]
        # bf16 holds 8 bits: hidden states differ by rounding between decoding and a packed forward.
        torch.testing.assert_close(torch.tensor(response.log_probs), expected.detach(), atol=0.25, rtol=0)


def test_a_bfloat16_models_logits_are_not_rounded_to_bfloat16() -> None:
    runner = NativeRollout(tiny_llama().bfloat16(), RolloutConfig(), shares_storage=True)._runner
    assert runner.logits(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.float32
