"""burnish's sampler inside a vLLM engine on a GPU, with asynchronous scheduling: every token as its history alone gives it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.sampler import SamplingRows, draw, stream_key
from burnish.rollout.vllm.sampler import BurnishSampler
from tests.rollout.contract import make_requests
from tests.vllm.test_sampler import PLAIN, VARIANTS, Engine, llama

pytestmark = pytest.mark.gpu
# Padded by vLLM to a multiple of 64, so that the logits of a row do not follow each other's end.
VOCAB = 3001


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    folder = tmp_path_factory.mktemp("llama")
    llama(vocab_size=VOCAB, hidden_size=128, head_dim=64).bfloat16().save_pretrained(folder)
    # A cache of 20 blocks of 16 tokens for 10 rows: not all of them find room to their end.
    cramped = {"max_num_seqs": 10, "max_num_batched_tokens": 32, "block_size": 16, "num_gpu_blocks_override": 20}
    engine = Engine(folder, dtype="bfloat16", async_scheduling=True, **cramped)
    patch.undo()
    return engine


class Watch:
    """Notes the logits that each token was drawn from."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.dtypes: set[torch.dtype] = set()
        inner = BurnishSampler._draw

        def noted(sampler: BurnishSampler, logits: Tensor, count: int) -> Any:
            runner = engine.runner
            lengths, discarded = runner.seq_lens[:count].tolist(), runner.discard_request_mask.np[:count]
            self.dtypes.add(logits.dtype)
            for row, name in enumerate(runner.input_batch.req_ids):
                if not discarded[row]:  # vLLM adds something of its own to the names of requests, behind a dash.
                    self.logits[name.split("-")[0], lengths[row]] = logits[row].clone()
            return inner(sampler, logits, count)

        monkeypatch.setattr(BurnishSampler, "_draw", noted)


def alone(
    logits: Tensor, request: RolloutRequest, sampled: list[int], sampling: SamplingParams
) -> tuple[int, float, float]:
    """What a request draws behind the tokens that it has: the token and both log-probs."""
    length, device = len(request.prompt_ids) + len(sampled), logits.device
    seen = torch.zeros(1, len(logits), dtype=torch.bool, device=device)
    seen[0, [*request.prompt_ids, *sampled]] = True

    def one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=device)

    rows = SamplingRows(
        keys=one(stream_key(sampling.seed, request.uid, request.sample_index), torch.int64),
        positions=one(length, torch.int64),
        temperature=one(0.0 if sampling.greedy else sampling.temperature),
        top_k=one(0 if sampling.greedy else max(0, sampling.top_k), torch.int32),
        top_p=one(1.0 if sampling.greedy else sampling.top_p),
        min_p=one(0.0 if sampling.greedy else sampling.min_p),
        repetition_penalty=one(sampling.repetition_penalty),
        stop_ids=torch.tensor([sampling.end_token_ids or (-1,)], dtype=torch.int32, device=device),
        may_stop=one(len(sampled) >= sampling.min_new_tokens, torch.bool),
        seen=seen,
    )
    drawn = draw(logits[None], rows, truncates=True)
    assert drawn.truncated_log_probs is not None
    return int(drawn.tokens), float(drawn.log_probs), float(drawn.truncated_log_probs)


def mixed(vocab: int) -> list[RolloutRequest]:
    requests = make_requests(9, 4, vocab=vocab)
    return [replace(request, sampling=VARIANTS[number % len(VARIANTS)]) for number, request in enumerate(requests)]


def test_every_token_is_drawn_from_its_own_logits_and_history(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.runner.use_async_scheduling
    watch, requests = Watch(engine, monkeypatch), mixed(VOCAB)
    before = engine.num_preemptions
    outputs = engine.generate(requests)
    assert engine.num_preemptions > before
    num_compared = 0
    for request, output in zip(requests, outputs, strict=True):
        sampling, tokens = request.sampling or PLAIN, list(output.token_ids)
        width = 2 if sampling.truncates else 1
        columns = torch.tensor(output.logprobs.logprobs).view(-1, width)
        for place, token in enumerate(tokens):
            logits = watch.logits[request.request_id, len(request.prompt_ids) + place]
            expected, log_prob, truncated = alone(logits, request, tokens[:place], sampling)
            assert token == expected
            assert columns[place, 0].item() == pytest.approx(log_prob, abs=1e-5)
            if sampling.truncates:
                assert columns[place, 1].item() == pytest.approx(truncated, abs=1e-5)
            num_compared += 1
    assert num_compared > 500


def test_logits_of_a_half_precision_model_are_not_rounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(engine, monkeypatch)
    engine.generate(make_requests(2, 1, vocab=VOCAB), replace(PLAIN, max_new_tokens=4))
    assert watch.dtypes == {torch.float32}
    logits = next(iter(watch.logits.values()))
    assert (logits.bfloat16().float() != logits).float().mean() > 0.9


def test_the_sampler_never_waits_for_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.generate(mixed(VOCAB))  # Compiles the kernels.
    call = BurnishSampler.__call__

    def watched(sampler: BurnishSampler, logits: Tensor, sampling_metadata: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(sampler, logits, sampling_metadata, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(BurnishSampler, "__call__", watched)
    engine.generate(mixed(VOCAB))
