"""The native engine against transformers, on every architecture, and its own use of slots and memory."""

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.hf import HFRollout
from burnish.rollout.lifecycle import Lifecycle
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.runner import ModelRunner
from burnish.utils.errors import ModelError, RolloutError
from tests.rollout.contract import (
    assert_log_probs_are_those_of_a_plain_forward,
    assert_same_responses,
    make_requests,
    tiny_llama,
)

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama, one key head, tied": LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen2, window in some layers": Qwen2Config(
        **SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "mistral, window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6),
    "gemma2, window and soft-caps": Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=6, query_pre_attn_scalar=16
    ),
    "gemma": GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16),
    "gemma3, window and full layers": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=6, query_pre_attn_scalar=16
    ),
    "phi, biases and partial rotary": PhiConfig(**SIZES, num_key_value_heads=2),
    "phi3": Phi3Config(**SIZES, num_key_value_heads=2),
    "gpt-neox": GPTNeoXConfig(**SIZES),
}
FAST = ("llama", "qwen2", "qwen3", "mistral")


def fast_path_of(name: str) -> bool:
    """Whether a family has a fast path."""
    return name.startswith(FAST)


GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, eos_token_ids=(2, 3))


@cache
def generated_by_transformers(name: str) -> list[RolloutResponse]:
    """What greedy decoding gives, whatever ways the native engine takes."""
    reference = HFRollout(build_causal_lm(ARCHITECTURES[name]), RolloutConfig(), shares_storage=True)
    return reference.generate(make_requests(6, 1), GREEDY)


@pytest.mark.parametrize("block_size", [None, 4], ids=["whole sequences", "blocks of 4"])
@pytest.mark.parametrize(
    ("name", "universal"),
    [(name, universal) for name in ARCHITECTURES for universal in ([False, True] if fast_path_of(name) else [True])],
)
class TestAgainstTransformers:
    def engine(self, name: str, block_size: int | None, universal: bool, **config: Any) -> NativeRollout:
        engine = NativeRollout(
            build_causal_lm(ARCHITECTURES[name]),
            RolloutConfig(**config),
            shares_storage=True,
            block_size=block_size,
            universal=universal,
        )
        assert engine._runner.is_fast is not universal
        return engine

    def test_greedy_output_is_that_of_generate(self, name: str, block_size: int | None, universal: bool) -> None:
        requests = make_requests(6, 1)
        native = self.engine(name, block_size, universal, max_num_seqs=4).generate(requests, GREEDY)
        for request, ours, theirs in zip(requests, native, generated_by_transformers(name), strict=True):
            assert_same_up_to_ties(ARCHITECTURES[name], request, ours, theirs)

    def test_sampled_log_probs_are_those_of_a_plain_forward(
        self, name: str, block_size: int | None, universal: bool
    ) -> None:
        requests, sampling = make_requests(6, 3), SamplingParams(max_new_tokens=12, temperature=0.8)
        # Few prompt tokens at once, so that prompts are prefilled in parts.
        engine = self.engine(name, block_size, universal, max_num_seqs=7, max_num_batched_tokens=5)
        responses = engine.generate(requests, sampling)
        reference = build_causal_lm(ARCHITECTURES[name], attn=False)
        reference.set_attn_implementation("eager")
        assert_log_probs_are_those_of_a_plain_forward(reference, requests, responses, 0.8)


def assert_same_up_to_ties(
    config: PreTrainedConfig, request: RolloutRequest, ours: RolloutResponse, theirs: RolloutResponse
) -> None:
    """Equal tokens up to the first place where the two candidates' logits are within 1e-4."""
    if ours.token_ids == theirs.token_ids:
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=1e-4, rtol=0)
        return
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
    place = next(i for i, (a, b) in pairs if a != b)
    ids = torch.tensor([[*request.prompt_ids, *ours.token_ids[:place]]])
    reference = build_causal_lm(config, attn=False)
    reference.set_attn_implementation("eager")
    logits = reference(ids).logits[0, -1]
    assert abs(logits[ours.token_ids[place]] - logits[theirs.token_ids[place]]) <= 1e-4


PATHS: dict[str, dict[str, Any]] = {
    "whole sequences": {},
    "blocks of 4": {"block_size": 4},
    "scarce blocks": {"block_size": 4, "num_blocks": 17},
    "long windows": {"window": 5},
    "scarce blocks and long windows": {"block_size": 4, "num_blocks": 17, "window": 4},
    "hugging face modules": {"block_size": 8, "universal": True, "window": 3},
}


@pytest.mark.parametrize("path", PATHS)
def test_sampled_tokens_are_those_of_the_reference_engine(path: str) -> None:
    requests = make_requests(5, 4)
    sampling = SamplingParams(max_new_tokens=15, temperature=1.2, top_k=20, top_p=0.9, eos_token_ids=(2, 9), seed=1)
    native = NativeRollout(tiny_llama(), RolloutConfig(max_num_seqs=6), shares_storage=True, **PATHS[path])
    reference = HFRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    responses = native.generate(requests, sampling)
    assert_same_responses(responses, reference.generate(requests, sampling))
    preemptions = sum(response.num_preemptions for response in responses)
    assert (preemptions > 0) is path.startswith("scarce")
    assert native.stats.num_preemptions == preemptions


class Recorder(ModelRunner):
    """Notes what the model was called with."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[str, int]] = []

    def prefill(self, cache: Any, chunks: Any) -> None:
        self.calls.append(("prefill", sum(len(chunk.token_ids) for chunk in chunks)))
        super().prefill(cache, chunks)

    def decode_step(self, cache: Any, state: Any, num_rows: int, truncates: bool, penalises: bool) -> None:
        self.calls.append(("decode", num_rows))
        super().decode_step(cache, state, num_rows, truncates, penalises)


def recorded(*, engine: dict[str, Any] | None = None, **config: Any) -> tuple[NativeRollout, Recorder]:
    model = tiny_llama()
    rollout = NativeRollout(model, RolloutConfig(**config), shares_storage=True, **(engine or {}))
    runner = rollout._runner = Recorder(model, torch.device("cpu"))
    return rollout, runner


def test_finished_sequences_are_replaced_at_once_and_rows_never_exceed_the_limit() -> None:
    engine, runner = recorded(max_num_seqs=3)
    requests = make_requests(10, 1)
    sampling = SamplingParams(max_new_tokens=30, temperature=1.5, eos_token_ids=(2, 7, 11))
    finished: list[tuple[str, int]] = []
    responses = engine.generate(
        requests, sampling, lambda r: finished.append((r.request_id, sum(k == "prefill" for k, _ in runner.calls)))
    )
    decoded = [rows for kind, rows in runner.calls if kind == "decode"]
    assert max(decoded) == 3
    # Full as long as requests wait, so every step but the last sequences' has three rows, and none computes a hole.
    assert decoded == sorted(decoded, reverse=True)
    assert sum(decoded) == sum(len(r.token_ids) for r in responses)
    assert finished[0][1] < finished[-1][1]  # The first was handed out before the last was even prefilled.


def test_samples_of_a_prompt_are_prefilled_once_even_if_they_do_not_run_together() -> None:
    engine, runner = recorded(max_num_seqs=3, engine={"block_size": 4})
    prompt = list(range(5, 15))
    engine.generate([RolloutRequest(str(i), prompt, "p", i) for i in range(8)], SamplingParams(max_new_tokens=4))
    # The last token of the prompt is decoded, by each sample.
    assert [tokens for kind, tokens in runner.calls if kind == "prefill"] == [9]
    assert (engine.stats.num_prompt_tokens, engine.stats.num_prefilled_tokens) == (80, 9)


def test_long_prompts_are_prefilled_in_parts() -> None:
    engine, runner = recorded(max_num_batched_tokens=4)
    engine.generate([RolloutRequest("a", list(range(3, 15)), "p")], SamplingParams(max_new_tokens=2))
    assert [tokens for kind, tokens in runner.calls if kind == "prefill"] == [4, 4, 3]
    engine, runner = recorded(max_num_batched_tokens=4, enable_chunked_prefill=False)
    engine.generate([RolloutRequest("a", list(range(3, 15)), "p")], SamplingParams(max_new_tokens=2))
    assert [tokens for kind, tokens in runner.calls if kind == "prefill"] == [11]


def test_sleep_frees_the_cache() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    engine.generate(make_requests(), SamplingParams(max_new_tokens=4))
    assert engine.cache_bytes > 0
    engine.sleep()
    assert engine.cache_bytes == 0
    engine.wake_up()
    engine.generate(make_requests(), SamplingParams(max_new_tokens=4))
    assert engine.cache_bytes > 0
    with pytest.raises(RolloutError, match="level is 1 or 2"):
        engine.sleep(level=3)


def test_a_cache_that_does_not_fit_runs_fewer_sequences_or_is_refused() -> None:
    requests, sampling = make_requests(4, 2), SamplingParams(max_new_tokens=4)
    expected = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True).generate(requests, sampling)
    engine = NativeRollout(tiny_llama(), RolloutConfig(gpu_memory_utilization=1e-9), shares_storage=True)
    with pytest.raises(
        RolloutError, match=r"One sequence of \d+ tokens needs .* Set rollout.gpu_memory_utilization to at"
    ):
        engine.generate(requests, sampling)
    engine, runner = recorded(engine={"num_blocks": 5})
    assert_same_responses(engine.generate(requests, sampling), expected)
    assert max(rows for kind, rows in runner.calls if kind == "decode") == 2


def test_a_model_that_does_not_attend_through_burnish_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM cannot be decoded .*rollout\.name=vllm or rollout\.name=hf"
    ):
        NativeRollout(tiny_llama(attn=False), RolloutConfig(), shares_storage=True)


def test_weights_and_sleep_are_refused_while_it_generates() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    refused = []

    def interfere(response: RolloutResponse) -> None:
        for call in (lambda: engine.update_weights([], 1), engine.sleep, lambda: engine.generate([], sampling)):
            with pytest.raises(RolloutError, match="while the rollout engine is generating"):
                call()
            refused.append(response.request_id)

    sampling = SamplingParams(max_new_tokens=2)
    engine.generate(make_requests(1, 1), sampling, interfere)
    assert len(refused) == 3


def test_a_failed_copy_of_weights_is_never_sampled_from() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=False)
    with pytest.raises(RolloutError, match="ended without"):
        engine.update_weights([("model.norm.weight", torch.ones(32))], version=1)
    with pytest.raises(RolloutError, match="of no one policy"):
        engine.generate(make_requests(), SamplingParams(max_new_tokens=2))
    engine.update_weights(tiny_llama(seed=1).named_parameters(), version=1)
    engine.generate(make_requests(), SamplingParams(max_new_tokens=2))


def test_one_name_of_a_tied_pair_is_enough_and_both_are_welcome() -> None:
    source = tiny_llama(seed=1, tie_word_embeddings=True)
    requests, sampling = make_requests(), SamplingParams(max_new_tokens=5)
    expected = NativeRollout(source, RolloutConfig(), shares_storage=True).generate(requests, sampling)
    for stream in (dict(source.named_parameters()), source.state_dict()):
        own = tiny_llama(tie_word_embeddings=True)
        engine = NativeRollout(own, RolloutConfig(), shares_storage=False)
        engine.update_weights(stream.items(), version=0)
        assert_same_responses(engine.generate(requests, sampling), expected)
        assert own.lm_head.weight is own.model.embed_tokens.weight


def test_logits_that_are_not_finite_are_an_error_that_names_the_request() -> None:
    model = tiny_llama()
    norm = model.model.layers[0].input_layernorm  # So that keys and values in the cache are not finite either.
    engine = NativeRollout(model, RolloutConfig(), shares_storage=True)
    good = engine.generate(make_requests(), SamplingParams(max_new_tokens=3))
    weight = norm.weight.detach().clone()
    norm.weight.data.fill_(float("nan"))
    message = r"not finite for 8 of 8 sequences, first for request '0/0' at position 2.*the weight model\.layers\.0\.input_lay"
    with pytest.raises(RolloutError, match=message):
        engine.generate(make_requests(), SamplingParams(max_new_tokens=3))
    norm.weight.data.copy_(weight)
    # In the reverse order, so that short prompts stand where long ones were.
    again = engine.generate(make_requests()[::-1], SamplingParams(max_new_tokens=3))
    assert_same_responses(again[::-1], good)


def test_a_response_that_was_cut_goes_on_as_if_it_had_not_been() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    request = RolloutRequest("a", [5, 6, 7], "p", 2)
    whole = engine.generate([request], SamplingParams(max_new_tokens=10))[0].token_ids
    rest = RolloutRequest("a", [5, 6, 7, *whole[:4]], "p", 2)
    assert engine.generate([rest], SamplingParams(max_new_tokens=6))[0].token_ids == whole[4:]


def test_the_first_tensor_that_overflows_is_named() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(1e38)
    engine = NativeRollout(model, RolloutConfig(), shares_storage=True)
    with pytest.raises(RolloutError, match=r"the output of model\.layers\.1\.mlp\.down_proj"):
        engine.generate(make_requests(), SamplingParams(max_new_tokens=3))


class Pausing:
    """Pauses an engine when its first response is there, lets ``meanwhile`` run in another thread, and resumes."""

    def __init__(self, engine: NativeRollout, meanwhile: Callable[[], None]) -> None:
        self.engine, self.meanwhile = engine, meanwhile
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def __call__(self, response: RolloutResponse) -> None:
        if self.thread is None:
            self.engine.pause()
            self.thread = threading.Thread(target=self._work)
            self.thread.start()

    def _work(self) -> None:
        try:
            self.engine.pause()  # Returns when it stands still.
            self.meanwhile()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error
        finally:
            self.engine.resume()


@pytest.mark.parametrize("path", ["whole sequences", "blocks of 4", "long windows"])
def test_paused_for_an_update_it_goes_on_with_the_new_weights_from_the_tokens_it_has(path: str) -> None:
    old, new = tiny_llama(), tiny_llama(seed=1)
    engine = NativeRollout(old, RolloutConfig(), shares_storage=False, **PATHS[path])
    requests = [RolloutRequest(str(i), [5, 6, 7, 8 + i], f"p{i}", 0) for i in range(6)]
    sampling = SamplingParams(max_new_tokens=20, temperature=1.5, eos_token_ids=(2, 3, 4), seed=2)
    pausing = Pausing(engine, lambda: engine.update_weights(new.named_parameters(), version=7))
    responses = engine.generate(requests, sampling, pausing)
    assert pausing.failure is None
    both = [response for response in responses if len(response.policy_versions) == 2]
    assert both
    for request, response in zip(requests, responses, strict=True):
        assert sum(count for _, count in response.policy_versions) == len(response.token_ids)
        assert response.policy_version == response.policy_versions[0][0] == 0
        count = response.policy_versions[0][1]
        rest = RolloutRequest("r", [*request.prompt_ids, *response.token_ids[:count]], request.uid, 0)
        if response in both:
            assert response.policy_versions[1][0] == 7
            by_new = NativeRollout(new, RolloutConfig(), shares_storage=True).generate(
                [rest], dataclasses.replace(sampling, max_new_tokens=20 - count)
            )[0]
            assert by_new.token_ids == response.token_ids[count:]
            torch.testing.assert_close(by_new.log_probs, response.log_probs[count:], atol=1e-5, rtol=0)


def test_paused_and_put_to_sleep_it_goes_on_as_if_nothing_had_been() -> None:
    requests, sampling = make_requests(4, 2), SamplingParams(max_new_tokens=20, eos_token_ids=(2, 3), seed=4)
    expected = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True).generate(requests, sampling)
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)

    def nap() -> None:
        engine.sleep()
        assert engine.cache_bytes == 0
        engine.wake_up()

    pausing = Pausing(engine, nap)
    assert_same_responses(engine.generate(requests, sampling, pausing), expected)
    assert pausing.failure is None


def test_an_update_counts_even_if_it_keeps_the_version() -> None:
    old, new = tiny_llama(), tiny_llama(seed=1)
    engine = NativeRollout(old, RolloutConfig(), shares_storage=False, block_size=4)
    requests = [RolloutRequest(str(i), [5, 6, 7, 8 + i], f"p{i}", 0) for i in range(6)]
    sampling = SamplingParams(max_new_tokens=20, temperature=1.5, eos_token_ids=(2, 3, 4), seed=2)
    pausing = Pausing(engine, lambda: engine.update_weights(new.named_parameters(), version=0))
    responses = engine.generate(requests, sampling, pausing)
    assert max(response.num_preemptions for response in responses) == 1


def test_a_paused_engine_generates_for_nobody_else() -> None:
    requests, sampling = make_requests(4, 2), SamplingParams(max_new_tokens=20, eos_token_ids=(2, 3), seed=4)
    expected = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True).generate(requests, sampling)
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True, block_size=4)

    def interfere() -> None:
        with pytest.raises(RolloutError, match="it is paused, not free"):
            engine.generate(requests, sampling)

    pausing = Pausing(engine, interfere)
    assert_same_responses(engine.generate(requests, sampling, pausing), expected)
    assert pausing.failure is None


def test_a_pause_right_after_a_resume_waits_for_the_engine_again() -> None:
    lifecycle, log, stop = Lifecycle(shares_storage=True), [], threading.Event()

    def work() -> None:
        with lifecycle.generating():
            while not stop.is_set():
                lifecycle.stand_still_while_paused()
                log.append("round")
                time.sleep(0.0005)

    worker = threading.Thread(target=work)
    worker.start()
    while not log:
        time.sleep(0.001)
    for _ in range(50):
        lifecycle.pause()
        with lifecycle.exclusive("update_weights"):
            before = len(log)
            time.sleep(0.0003)
            assert len(log) == before
        lifecycle.resume()
    stop.set()
    worker.join()


def test_stop_tokens_of_an_earlier_call_end_nothing() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    many = SamplingParams(max_new_tokens=6, eos_token_ids=tuple(range(30)), seed=1)
    assert "stop" in {response.finish_reason for response in engine.generate(make_requests(), many)}
    none = SamplingParams(max_new_tokens=6, seed=1)
    assert {response.finish_reason for response in engine.generate(make_requests(), none)} == {"length"}


def test_a_session_takes_requests_while_others_run_and_streams_their_tokens() -> None:
    requests, sampling = make_requests(4, 2), SamplingParams(max_new_tokens=8, eos_token_ids=(2,), seed=3)
    expected = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True).generate(requests, sampling)
    streamed: dict[str, list[int]] = {}
    finished: dict[str, RolloutResponse] = {}
    engine = NativeRollout(tiny_llama(), RolloutConfig(max_num_seqs=3), shares_storage=True)
    with engine.open_session(
        on_tokens=lambda name, ids, _: streamed.setdefault(name, []).extend(ids),
        on_finished=lambda response: finished.update({response.request_id: response}),
    ) as session:
        assert session.step() is False
        for request in requests:
            session.add([dataclasses.replace(request, sampling=sampling)])
            session.step()
        with pytest.raises(RolloutError, match="has no sampling parameters"):
            session.add([RolloutRequest("other", [5], "p")])
        with pytest.raises(RolloutError, match="while the rollout engine is generating"):
            engine.generate(requests, sampling)
        while session.step():
            pass
    assert_same_responses([finished[request.request_id] for request in requests], expected)
    assert streamed == {response.request_id: response.token_ids for response in expected}
    assert_same_responses(engine.generate(requests, sampling), expected)


def test_a_session_refuses_an_id_that_runs_and_forgets_it_when_it_is_answered() -> None:
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    request = RolloutRequest("a", [5, 6], "p", 0, SamplingParams(max_new_tokens=3))
    with engine.open_session() as session:
        session.add([request])
        with pytest.raises(RolloutError, match="'a' is running already"):
            session.add([request])
        while session.step():
            pass
        session.add([request])
        engine.abort(["a"])
        while session.step():
            pass


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_answers_as_a_plain_forward_does(dtype: torch.dtype) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 64}, num_key_value_heads=2)
    requests, sampling = make_requests(6, 3), SamplingParams(max_new_tokens=12, temperature=0.8)
    engine = NativeRollout(
        build_causal_lm(config, dtype).cuda(), RolloutConfig(max_num_seqs=7), shares_storage=True, device="cuda"
    )
    responses = engine.generate(requests, sampling)
    reference = build_causal_lm(config, dtype, attn=False)
    assert_log_probs_are_those_of_a_plain_forward(
        reference, requests, responses, 0.8, atol=1e-4 if dtype == torch.float32 else 0.5
    )
