"""The native engine against transformers, on every architecture, and its own use of slots and memory."""

import time
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.hf import HFRollout
from burnish.rollout.native.cache import SlotCache
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.model_runner import ModelRunner
from burnish.rollout.native.scheduler import Move
from burnish.utils.errors import RolloutError
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
    "gpt-neox": GPTNeoXConfig(**SIZES),
}


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
class TestAgainstTransformers:
    def test_greedy_output_is_that_of_generate(self, config: PreTrainedConfig) -> None:
        model, requests = build_causal_lm(config), make_requests(6, 1)
        sampling = SamplingParams(max_new_tokens=20, temperature=0.0, eos_token_ids=(2, 3))
        native = NativeRollout(model, RolloutConfig(max_num_seqs=4), shares_storage=True).generate(requests, sampling)
        reference = HFRollout(model, RolloutConfig(), shares_storage=True).generate(requests, sampling)
        for request, ours, theirs in zip(requests, native, reference, strict=True):
            assert_same_up_to_ties(config, request, ours, theirs)

    def test_sampled_log_probs_are_those_of_a_plain_forward(self, config: PreTrainedConfig) -> None:
        requests, sampling = make_requests(6, 3), SamplingParams(max_new_tokens=12, temperature=0.8)
        engine = NativeRollout(build_causal_lm(config), RolloutConfig(max_num_seqs=7), shares_storage=True)
        responses = engine.generate(requests, sampling)
        reference = build_causal_lm(config, attn=False)
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


def test_sampled_tokens_are_those_of_the_reference_engine() -> None:
    requests = make_requests(5, 4)
    sampling = SamplingParams(max_new_tokens=15, temperature=1.2, top_k=20, top_p=0.9, eos_token_ids=(2, 9), seed=1)
    native = NativeRollout(tiny_llama(), RolloutConfig(max_num_seqs=6), shares_storage=True)
    reference = HFRollout(tiny_llama(), RolloutConfig(), shares_storage=True)
    assert_same_responses(native.generate(requests, sampling), reference.generate(requests, sampling))


class Recorder(ModelRunner):
    """Notes what the model was called with."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[str, int]] = []

    def prefill(self, groups: Any) -> torch.Tensor:
        self.calls.append(("prefill", sum(len(group.prompt_ids) for group in groups)))
        return super().prefill(groups)

    def decode(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        self.calls.append(("decode", len(tokens)))
        assert self.cache.num_slots <= 3
        return super().decode(tokens, lengths, longest)


def recorded(**config: Any) -> tuple[NativeRollout, Recorder]:
    engine = NativeRollout(tiny_llama(), RolloutConfig(**config), shares_storage=True)
    runner = engine._runner = Recorder(tiny_llama(), torch.device("cpu"))
    return engine, runner


def test_finished_sequences_are_replaced_at_once_and_slots_never_exceed_the_limit() -> None:
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
    assert sum(decoded) == sum(len(r.token_ids) - 1 for r in responses)
    assert finished[0][1] < finished[-1][1]  # The first was handed out before the last was even prefilled.


def test_samples_of_a_prompt_are_prefilled_once() -> None:
    engine, runner = recorded(max_num_seqs=3)
    engine.generate([RolloutRequest(str(i), [5, 6, 7, 8], "p", i) for i in range(3)], SamplingParams(max_new_tokens=4))
    assert [tokens for kind, tokens in runner.calls if kind == "prefill"] == [4]


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
    engine = NativeRollout(tiny_llama(), RolloutConfig(), shares_storage=True, memory_fraction=1e-9)
    with pytest.raises(RolloutError, match=r"One sequence of 15 tokens needs .* Shorten"):
        engine.generate(requests, sampling)
    engine, runner = recorded()
    engine._slots_that_fit = lambda _: 2  # type: ignore[method-assign]
    assert_same_responses(engine.generate(requests, sampling), expected)
    assert max(rows for kind, rows in runner.calls if kind == "decode") == 2


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
    with pytest.raises(RolloutError, match=r"not finite for 8 of 8 sequences, first for request '0/0' at position 2"):
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


def test_a_new_generation_never_lets_the_cache_pass_its_size() -> None:
    cache = SlotCache()
    for num_slots, length in [(8, 100), (2, 400), (8, 100), (9, 120), (3, 30)]:
        cache.begin(num_slots, length)
        for needed in range(1, length + 1, 7):
            cache.reserve(num_slots, needed)
            assert cache.num_slots >= num_slots
            assert cache.length >= needed
            assert cache.num_slots * cache.length <= max(num_slots * length, 9 * 120)


def test_a_growing_cache_keeps_what_it_holds() -> None:
    cache = SlotCache()
    cache.begin(2, 300)
    cache.reserve(2, 3)
    key = torch.randn(3, 2, 4)
    cache.store(0, torch.tensor([1, 1, 1]), torch.arange(3), key, key + 1)
    cache.reserve(5, 200)
    cache.move([Move(1, 0)], 3)
    stored_key, stored_value = cache.view(0, 2, 3)
    assert torch.equal(stored_key, key.transpose(0, 1).expand(2, -1, -1, -1))
    assert torch.equal(stored_value, stored_key + 1)
    assert cache.nbytes == 2 * 5 * cache.length * 2 * 4 * 4


@pytest.mark.slow
def test_bookkeeping_is_small_beside_the_model() -> None:
    sizes = {**SIZES, "vocab_size": 128, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    engine = NativeRollout(build_causal_lm(LlamaConfig(**sizes)), RolloutConfig(max_num_seqs=512), shares_storage=True)
    requests, sampling = make_requests(64, 8, vocab=128), SamplingParams(max_new_tokens=8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.generate(requests, sampling)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


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
