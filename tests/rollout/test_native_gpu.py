"""The native engine on a GPU: captured steps against plain ones and against transformers, and memory that comes and goes."""

import dataclasses
from typing import Any

import pytest
import torch

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.model.projections import pack_projections
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.hf import HFRollout
from burnish.rollout.native.engine import NativeRollout
from tests.rollout.contract import assert_log_probs_are_those_of_a_plain_forward, make_requests
from tests.rollout.test_native import ARCHITECTURES, FAST, SIZES, fast_path_of

pytestmark = pytest.mark.gpu

VARIED = [
    SamplingParams(max_new_tokens=40, temperature=0.8, eos_token_ids=(2, 9), seed=1),
    SamplingParams(max_new_tokens=33, temperature=0.0, eos_token_ids=(2, 9)),
    SamplingParams(max_new_tokens=21, temperature=1.3, top_p=0.8, top_k=12, seed=2),
    SamplingParams(max_new_tokens=17, min_p=0.05, repetition_penalty=1.3, seed=3, eos_token_ids=(2,), min_new_tokens=6),
]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = build_causal_lm(ARCHITECTURES[name], dtype).cuda()
    pack_projections(model)
    return model


def engine_of(model: Any, *, universal: bool = False, num_blocks: int | None = None, **config: Any) -> NativeRollout:
    settings = {"max_num_seqs": 12, "gpu_memory_utilization": 0.1, **config}
    return NativeRollout(
        model, RolloutConfig(**settings), shares_storage=True, device="cuda", universal=universal, num_blocks=num_blocks
    )


def varied_requests() -> list[RolloutRequest]:
    """Samples of several prompts, each drawn in one of several ways."""
    requests = make_requests(8, 3)
    return [
        dataclasses.replace(request, sampling=VARIED[place % len(VARIED)]) for place, request in enumerate(requests)
    ]


def assert_nearly_the_same(actual: list[RolloutResponse], expected: list[RolloutResponse]) -> None:
    """Equal but for a response that a draw within rounding of a boundary led elsewhere; log-probs equal up to there."""
    differing = 0
    for ours, theirs in zip(actual, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.token_ids), len(theirs.token_ids)))
        differing += ours.token_ids != theirs.token_ids
        torch.testing.assert_close(ours.log_probs[:same], theirs.log_probs[:same], atol=1e-4, rtol=0)
    assert differing <= 1


@pytest.mark.parametrize("universal", [False, True])
def test_captured_steps_answer_as_plain_ones(universal: bool) -> None:
    model, requests = build("qwen3"), varied_requests()
    plain = engine_of(model, universal=universal, enforce_eager=True).generate(requests, VARIED[0])
    captured = engine_of(model, universal=universal)
    assert_nearly_the_same(captured.generate(requests, VARIED[0]), plain)
    assert captured._decoder is not None
    assert captured._decoder.graphs is not None
    assert not captured._decoder.graphs.failed


@pytest.mark.parametrize(
    ("name", "universal"),
    [(name, universal) for name in ARCHITECTURES for universal in ([False, True] if fast_path_of(name) else [True])],
)
def test_every_architecture_samples_what_the_reference_engine_does(name: str, universal: bool) -> None:
    model, requests = build(name), make_requests(6, 3)
    sampling = SamplingParams(max_new_tokens=20, temperature=0.8, eos_token_ids=(2, 3), seed=1)
    engine = engine_of(model, universal=universal)
    responses = engine.generate(requests, sampling)
    assert engine._decoder is not None
    assert engine._decoder.graphs is not None
    assert not engine._decoder.graphs.failed
    reference = HFRollout(model, RolloutConfig(), shares_storage=True, device="cuda").generate(requests, sampling)
    assert_nearly_the_same(responses, reference)


def test_graphs_stay_valid_while_the_cache_goes_and_comes_back_elsewhere() -> None:
    model, requests = build("llama"), varied_requests()
    engine = engine_of(model)
    expected = engine.generate(requests, VARIED[0])
    assert engine._decoder is not None
    assert engine._decoder.graphs is not None
    captured = len(engine._decoder.graphs._graphs)
    before = engine._decoder.cache.addresses.clone()
    engine.sleep()
    assert engine.cache_bytes == 0
    # Of all sizes, so that whatever the cache had is taken.
    kept = [torch.empty(1 << size, dtype=torch.uint8, device="cuda") for size in range(9, 23) for _ in range(200)]
    engine.wake_up()
    assert_nearly_the_same(engine.generate(requests, VARIED[0]), expected)
    assert not torch.equal(before, engine._decoder.cache.addresses)
    assert len(engine._decoder.graphs._graphs) == captured
    assert kept


def test_an_update_of_the_weights_in_place_is_seen_and_moved_weights_are_captured_again() -> None:
    model, other, requests = build("llama"), build("llama"), make_requests(4, 2)
    sampling = SamplingParams(max_new_tokens=12, seed=4)
    engine = engine_of(model)
    first = engine.generate(requests, sampling)
    with torch.no_grad():
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(0.9)
    expected = engine_of(other, enforce_eager=True).generate(requests, sampling)
    assert_nearly_the_same(engine.generate(requests, sampling), expected)
    assert [r.log_probs for r in first] != [r.log_probs for r in expected]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(1 / 0.9)
    assert_nearly_the_same(engine.generate(requests, sampling), first)


def test_scarce_blocks_preempt_and_change_no_response() -> None:
    model, requests = build("llama"), make_requests(12, 2)
    sampling = SamplingParams(max_new_tokens=90, temperature=1.0, seed=5)
    plenty = engine_of(model).generate(requests, sampling)
    scarce = engine_of(model, num_blocks=20)
    responses = scarce.generate(requests, sampling)
    assert scarce.stats.num_preemptions > 0
    assert_nearly_the_same(responses, plenty)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in FAST])
def test_bfloat16_log_probs_are_near_those_of_a_plain_forward(name: str) -> None:
    requests, sampling = make_requests(6, 3), SamplingParams(max_new_tokens=12, temperature=0.8)
    responses = engine_of(build(name, torch.bfloat16)).generate(requests, sampling)
    reference = build_causal_lm(ARCHITECTURES[name], torch.bfloat16, attn=False)
    assert_log_probs_are_those_of_a_plain_forward(reference, requests, responses, 0.8, atol=0.5)


def test_long_prompts_are_prefilled_in_parts() -> None:
    model = build("llama", torch.bfloat16)
    requests = [RolloutRequest(str(i), [3 + (7 * j + i) % 30 for j in range(90)], str(i)) for i in range(3)]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    whole = engine_of(model).generate(requests, sampling)
    parts = engine_of(model, max_num_batched_tokens=40).generate(requests, sampling)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours.log_probs[:1], theirs.log_probs[:1], atol=0.1, rtol=0)


def test_a_cache_that_cannot_be_had_names_the_keys() -> None:
    model = build("llama")
    assert SIZES["max_position_embeddings"] == 128
    engine = engine_of(model, gpu_memory_utilization=1e-9)
    with pytest.raises(Exception, match=r"rollout.gpu_memory_utilization"):
        engine.generate(make_requests(), SamplingParams(max_new_tokens=4))
