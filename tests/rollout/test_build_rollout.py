"""A rollout stands on the trained weights where it can, and on its own copy otherwise."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from burnish.config import ActorRolloutRefConfig, RolloutConfig
from burnish.rollout import SamplingParams, build_rollout
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
