"""vLLM in this process on a GPU: asynchronous scheduling, sleep, weights that arrive in an engine that sleeps."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.vllm.arguments import VLLMModel
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.weights import weights_checksum
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_log_probs_are_those_of_a_plain_forward, make_requests, tiny_llama
from tests.rollout.sampling_contract import letter_tokenizer

pytestmark = pytest.mark.gpu

SAMPLING = SamplingParams(max_new_tokens=30, temperature=1.3, eos_token_ids=(2, 7), seed=5)
MIB = 2**20


def model_of(seed: int = 0) -> PreTrainedModel:
    return tiny_llama(seed, head_dim=64).to(torch.bfloat16)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMRollout]:
    folder = tmp_path_factory.mktemp("model")
    model_of().save_pretrained(folder)
    config = RolloutConfig(
        mode="sync",
        load_format="auto",
        max_num_seqs=32,
        gpu_memory_utilization=0.1,
        cudagraph_capture_sizes=[1, 8, 32],
    )
    described = VLLMModel(path=str(folder), config=model_of().config, dtype=torch.bfloat16)
    made = VLLMRollout(described, config, device="cuda", tokenizer=letter_tokenizer())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _same_weights(engine: VLLMRollout) -> None:
    engine.update_weights(model_of().cuda().named_parameters(), version=0)
    engine.wake_up()


def tokens(responses: list[RolloutResponse]) -> list[list[int]]:
    return [response.token_ids for response in responses]


def test_log_probs_are_those_of_a_plain_forward(engine: VLLMRollout) -> None:
    requests = make_requests(6, 4)
    responses = engine.generate(requests, SAMPLING)
    reference = tiny_llama(head_dim=64, attn=False).to(torch.bfloat16).float()
    assert_log_probs_are_those_of_a_plain_forward(reference, requests, responses, 1.3, atol=0.15)


def test_aborts_and_stop_strings_drop_what_the_engine_is_ahead(engine: VLLMRollout) -> None:
    requests, sampling = make_requests(6, 4), replace(SAMPLING, ignore_eos=True)
    whole = engine.generate(requests, sampling)
    stopped = engine.generate(requests, replace(sampling, stop=("ab", "c")))
    assert "stop" in {response.finish_reason for response in stopped}
    for part, full in zip(stopped, whole, strict=True):
        # In bfloat16 another batch may round another way; what was drawn before that is the same.
        same = min(len(part.token_ids), 3)
        assert part.token_ids[:same] == full.token_ids[:same]
        assert len(part.log_probs) == len(part.token_ids)
    short = [replace(r, sampling=replace(sampling, max_new_tokens=4)) if i == 0 else r for i, r in enumerate(requests)]
    aborted = engine.generate(short, sampling, lambda _: engine.abort())
    assert {response.finish_reason for response in aborted[1:]} == {"abort"}
    assert all(3 <= len(response.token_ids) <= 5 for response in aborted[1:])
    assert tokens(engine.generate(requests, sampling)) == tokens(whole)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_an_update_fills_an_engine_that_sleeps(engine: VLLMRollout, level: int) -> None:
    requests = make_requests(6, 4)
    before, awake = engine.generate(requests, SAMPLING), torch.cuda.mem_get_info()[0]
    engine.sleep(level)
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - awake > 0.8 * engine.core.cache_bytes
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(requests, SAMPLING)
    other = model_of(1).cuda()
    engine.update_weights(other.named_parameters(), version=1)
    assert asleep - torch.cuda.mem_get_info()[0] < 0.5 * engine.core.cache_bytes
    assert engine.weights_checksum() == weights_checksum(other)
    engine.wake_up()
    after = engine.generate(requests, SAMPLING)
    assert tokens(after) != tokens(before)
    engine.update_weights(model_of().cuda().named_parameters(), version=2)
    assert tokens(engine.generate(requests, SAMPLING)) == tokens(before)


def test_weights_survive_a_light_sleep_and_not_a_deep_one(engine: VLLMRollout) -> None:
    requests = make_requests(6, 4)
    before = engine.generate(requests, SAMPLING)
    engine.sleep(1)
    engine.wake_up()
    assert tokens(engine.generate(requests, SAMPLING)) == tokens(before)
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(RolloutError, match="forgot its weights"):
        engine.generate(requests, SAMPLING)


def test_a_pause_lets_other_weights_in_and_every_token_keeps_its_version(engine: VLLMRollout) -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=1.3, seed=5)
    requests = [
        RolloutRequest(r.request_id, r.prompt_ids, r.uid, r.sample_index, replace(sampling, max_new_tokens=4) if i == 0 else None)
        for i, r in enumerate(make_requests(4, 1))
    ]  # fmt: skip
    other = model_of(1).cuda()

    def update() -> None:
        engine.pause()
        engine.update_weights(other.named_parameters(), version=9)
        engine.resume()

    def swap(response: RolloutResponse) -> None:
        if response.request_id == requests[0].request_id:
            engine.pause()
            threading.Thread(target=update).start()

    responses = engine.generate(requests, sampling, swap)
    for response in responses[1:]:
        assert len(response.token_ids) == 12
        (old, num_old), (new, num_new) = response.policy_versions
        assert (old, new, num_old + num_new) == (0, 9, 12)
        assert 4 <= num_old <= 5
    # What came behind is what the other policy gives those tokens.
    reference = tiny_llama(1, head_dim=64, attn=False).to(torch.bfloat16).float()
    rest = [
        replace(request, prompt_ids=[*request.prompt_ids, *response.token_ids[:5]])
        for request, response in zip(requests[1:], responses[1:], strict=True)
    ]
    tails = [replace(r, token_ids=r.token_ids[5:], log_probs=r.log_probs[5:]) for r in responses[1:]]
    assert_log_probs_are_those_of_a_plain_forward(reference, rest, tails, 1.3, atol=0.2)
