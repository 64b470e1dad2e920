"""burnish's sampler inside a vLLM engine of this process: the tokens of the native engine, on every batch."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.requests import prepare
from burnish.rollout.vllm.sampler import install
from tests.rollout.contract import make_requests

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

PLAIN = SamplingParams(max_new_tokens=40, temperature=1.3, eos_token_ids=(2, 7), seed=5)
VARIANTS = (
    PLAIN,
    replace(PLAIN, temperature=0.0),
    replace(PLAIN, top_k=5, top_p=0.9),
    replace(PLAIN, min_p=0.1, ignore_eos=True),
    replace(PLAIN, repetition_penalty=1.6, ignore_eos=True),
    replace(PLAIN, repetition_penalty=0.8, top_k=12, min_new_tokens=20, stop_token_ids=(11, 12)),
)


class Engine:
    """A vLLM engine of this process with burnish's sampler in it; ``options`` are its ``EngineArgs``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import EngineArgs, LLMEngine

        small = {"max_model_len": 128, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 26}
        plain = {"skip_tokenizer_init": True, "enforce_eager": True, "seed": 0, "dtype": "float32"}
        args = {**small, **plain, **options}
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **args))
        self.engine.collective_rpc(lambda worker: install(worker.model_runner))
        self.runner = self.engine.collective_rpc(lambda worker: worker.model_runner)[0]
        self.num_preemptions = 0
        self.partial_prefills = 0

    def add(self, request: RolloutRequest, sampling: SamplingParams) -> None:
        from vllm import SamplingParams as VLLMSamplingParams

        prepared = prepare(request, request.sampling or sampling)
        prompt = {"prompt_token_ids": prepared.prompt_ids}
        self.engine.add_request(prepared.request_id, prompt, VLLMSamplingParams(**prepared.params))

    def step(self) -> list[Any]:
        scheduler = self.engine.engine_core.engine_core.scheduler
        before = {request.request_id: request.num_preemptions for request in scheduler.running}
        outputs = self.engine.step()
        mask = self.runner.discard_request_mask
        self.partial_prefills += int(mask.np[: self.runner.input_batch.num_reqs].sum())
        for name, count in before.items():
            if name in scheduler.requests:
                self.num_preemptions += scheduler.requests[name].num_preemptions - count
        return [output for output in outputs if output.finished]

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingParams = PLAIN) -> list[Any]:
        """vLLM's outputs, in the order of the requests."""
        for request in requests:
            self.add(request, sampling)
        finished = {}
        while self.engine.has_unfinished_requests():
            finished |= {output.request_id: output.outputs[0] for output in self.step()}
        return [finished[request.request_id] for request in requests]


def llama(*, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """With heads that vLLM's attention on a CPU has, and room for 128 tokens."""
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return build_causal_lm(
        LlamaConfig(**{**small, **heads, "initializer_range": 0.3, "pad_token_id": 0, **sizes}), seed=seed
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def vllm_environment() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def roomy(folder: Path, vllm_environment: None) -> Engine:
    """All requests at once."""
    return Engine(folder, max_num_seqs=64)


@pytest.fixture(scope="module")
def cramped(folder: Path, vllm_environment: None) -> Engine:
    """Prompts in parts, few rows, and a cache in which they do not all find room to their end."""
    return Engine(
        folder,
        max_num_seqs=5,
        max_num_batched_tokens=8,
        enable_chunked_prefill=True,
        block_size=32,
        num_gpu_blocks_override=7,
    )


def mixed_requests() -> list[RolloutRequest]:
    """Every variant of sampling beside every other one."""
    requests = make_requests(9, 4)
    return [replace(request, sampling=VARIANTS[number % len(VARIANTS)]) for number, request in enumerate(requests)]


def native_responses(requests: Sequence[RolloutRequest], sampling: SamplingParams = PLAIN) -> list[RolloutResponse]:
    return NativeRollout(llama(), RolloutConfig(), shares_storage=True, device="cpu").generate(requests, sampling)


def assert_same(outputs: Sequence[Any], responses: Sequence[RolloutResponse], atol: float = 5e-5) -> None:
    """The same tokens, reasons and, to ``atol``, both log-probs."""
    for output, response in zip(outputs, responses, strict=True):
        assert list(output.token_ids) == response.token_ids
        assert output.finish_reason == response.finish_reason
        flat = output.logprobs
        width = 1 if response.truncated_log_probs is None else 2
        columns = torch.tensor(flat.logprobs).view(-1, width).T
        torch.testing.assert_close(columns[0], torch.tensor(response.log_probs), atol=atol, rtol=0)
        if response.truncated_log_probs is not None:
            torch.testing.assert_close(columns[1], torch.tensor(response.truncated_log_probs), atol=atol, rtol=0)


def test_tokens_and_log_probs_are_those_of_the_native_engine(roomy: Engine) -> None:
    requests = mixed_requests()
    assert_same(roomy.generate(requests), native_responses(requests))


def test_a_batch_in_which_nothing_truncates(roomy: Engine) -> None:
    requests = make_requests(6, 3)
    assert_same(roomy.generate(requests), native_responses(requests))


def test_prompts_in_parts_and_preempted_responses_change_nothing(cramped: Engine) -> None:
    requests = mixed_requests()
    outputs = cramped.generate(requests)
    assert cramped.num_preemptions > 0
    assert cramped.partial_prefills > 0
    assert_same(outputs, native_responses(requests))


def test_a_request_that_comes_again_under_the_id_of_an_aborted_one(roomy: Engine) -> None:
    first, *others = mixed_requests()[:9]
    roomy.add(replace(first, sampling=replace(PLAIN, repetition_penalty=3.0, ignore_eos=True)), PLAIN)
    for _ in range(5):
        roomy.step()
    roomy.engine.abort_request([first.request_id])
    again = replace(first, sampling=VARIANTS[4])
    assert_same(roomy.generate([again, *others]), native_responses([again, *others]))


def test_requests_that_join_while_others_run(roomy: Engine) -> None:
    requests = mixed_requests()
    finished = {}
    for request in requests:
        roomy.add(request, PLAIN)
        finished |= {output.request_id: output.outputs[0] for output in roomy.step()}
    while roomy.engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in roomy.step()}
    assert_same([finished[request.request_id] for request in requests], native_responses(requests))


def test_responses_go_on_after_the_cache_was_reset_under_them(roomy: Engine) -> None:
    requests = mixed_requests()
    for request in requests:
        roomy.add(request, PLAIN)
    finished = {}
    for step in range(200):
        if step in (3, 11, 20):  # As after an update of the weights.
            roomy.engine.engine_core.reset_prefix_cache(True)
        if roomy.engine.has_unfinished_requests():
            finished |= {output.request_id: output.outputs[0] for output in roomy.step()}
    assert_same([finished[request.request_id] for request in requests], native_responses(requests))
