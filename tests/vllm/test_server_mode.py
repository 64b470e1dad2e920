"""`rollout.mode=server` against vLLM's own OpenAI server: responses, log-probs, and weights that are proven to arrive."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from burnish.config import RolloutConfig
from burnish.model.attention import plain_attention
from burnish.model.load import load_causal_lm
from burnish.render import load_tokenizer
from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.stopping import StopStrings
from burnish.rollout.vllm.server import ServerRollout
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints
from tests.rollout.contract import assert_log_probs_are_those_of_a_plain_forward

pytest.importorskip("vllm")

REPO = Path(__file__).resolve().parents[2]
MODEL = str(REPO / "examples" / "tiny_model" / "model")
EOS = 257
SAMPLED = SamplingParams(max_new_tokens=30, eos_token_ids=(EOS,), seed=3)
GREEDY = SamplingParams(max_new_tokens=30, temperature=0.0, eos_token_ids=(EOS,))


class Served:
    """A server as a process."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            MODEL,
            "--port",
            str(port),
        ]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "64"]
        command += ["--distributed-executor-backend", "uni"]  # One process less to start.
        command += ["--worker-extension-cls", "burnish.rollout.vllm.served.ServedExtension"]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONPATH": str(REPO)}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=out, stderr=out, start_new_session=True
            )

    def end(self, how: int) -> None:
        """The server and what it started."""
        os.killpg(self.process.pid, how)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("server") / "log")
    yield served
    if served.process.poll() is None:
        served.end(9)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model():
    return load_causal_lm(MODEL)


def rollout_at(server: Served, model, tokenizer=None, **settings) -> ServerRollout:
    config = RolloutConfig(name="vllm", mode="server")
    config.server.url = [server.url]
    for name, value in {"retry_delay": 0.1, "timeout": 120.0, "max_start_wait_time": 240.0, **settings}.items():
        setattr(config.server, name, value)
    return ServerRollout(
        config,
        model_path=MODEL,
        model_config=model.config,
        vocab_size=model.config.vocab_size,
        tokenizer=tokenizer,
        dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def rollout(server, model, tokenizer, tmp_path_factory):
    return rollout_at(server, model, tokenizer, weights_dir=str(tmp_path_factory.mktemp("weights")))


def requests_of(tokenizer, n: int = 4) -> list[RolloutRequest]:
    prompts = [tokenizer(text)["input_ids"] for text in ("12+34=", "7*8=", "99-1=", "5+5=")]
    return [RolloutRequest(f"{i}/{k}", ids, f"p{i}", k) for i, ids in enumerate(prompts) for k in range(n)]


def tokens(responses) -> list[list[int]]:
    return [response.token_ids for response in responses]


def test_greedy_responses_are_those_of_the_native_engine(rollout, model, tokenizer):
    requests = requests_of(tokenizer, 1)
    native = NativeRollout(model, RolloutConfig(), shares_storage=True).generate(requests, GREEDY)
    served = rollout.generate(requests, GREEDY)
    assert tokens(served) == tokens(native)
    assert [(r.finish_reason, r.stop_reason) for r in served] == [(r.finish_reason, r.stop_reason) for r in native]


def test_sampled_log_probs_are_the_models_and_a_response_does_not_depend_on_the_batch(rollout, model, tokenizer):
    requests = requests_of(tokenizer)
    responses = rollout.generate(requests, SAMPLED)
    with plain_attention(model):
        assert_log_probs_are_those_of_a_plain_forward(model, requests, responses)
    assert len({tuple(t) for t in tokens(responses)}) > 3
    assert tokens(rollout.generate(requests[3:5], SAMPLED)) == tokens(responses[3:5])


def test_stop_strings_lengths_and_stop_tokens_end_a_response(rollout, tokenizer):
    request = requests_of(tokenizer, 1)[:1]
    free = SamplingParams(max_new_tokens=40, temperature=1.0, ignore_eos=True, seed=1)
    (whole,) = rollout.generate(request, free)
    assert (len(whole.token_ids), whole.finish_reason) == (40, "length")
    stop = next(c for c in tokenizer.decode(whole.token_ids, skip_special_tokens=True) if c.isdigit())
    (cut,) = rollout.generate(request, SamplingParams(max_new_tokens=40, ignore_eos=True, seed=1, stop=(stop,)))
    end = StopStrings(tokenizer, (stop,)).feed(whole.token_ids).index
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    last = whole.token_ids[5]
    (ended,) = rollout.generate(
        request, SamplingParams(max_new_tokens=40, ignore_eos=True, seed=1, stop_token_ids=(last,))
    )
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", last)


def test_an_abort_keeps_the_tokens_that_came(rollout, tokenizer):
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    short = SamplingParams(max_new_tokens=3, ignore_eos=True)
    requests = requests_of(tokenizer, 1)
    mixed = [RolloutRequest("short", requests[0].prompt_ids, "s", sampling=short), *requests]
    responses = rollout.generate(mixed, sampling, lambda response: rollout.abort())
    assert [r.finish_reason for r in responses] == ["length", *["abort"] * 4]
    assert all(len(r.token_ids) < 200 and len(r.log_probs) == len(r.token_ids) for r in responses)


def test_what_the_server_refuses_is_told_in_its_words(rollout, tokenizer):
    request = requests_of(tokenizer, 1)[:1]
    with pytest.raises(RolloutError, match=r"Request '0/0' was refused.*temperature"):
        rollout.generate(request, SamplingParams(max_new_tokens=3, temperature=1e6))
    assert len(rollout.generate(request, GREEDY)) == 1


def test_weights_arrive_and_are_proven_to(rollout, model, tokenizer):
    requests = requests_of(tokenizer, 1)
    before = rollout.generate(requests, GREEDY)
    other = load_causal_lm(MODEL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    sent = Fingerprints()
    for name, parameter in other.named_parameters():
        sent.add(name, parameter)
    rollout.update_weights(other.named_parameters(), version=5)
    assert rollout.weights_checksum() == sent.read()
    after = rollout.generate(requests, SAMPLED)
    with plain_attention(other):
        assert_log_probs_are_those_of_a_plain_forward(other, requests, after)
    assert {r.policy_version for r in after} == {5}
    assert tokens(rollout.generate(requests, GREEDY)) != tokens(before)
    with pytest.raises(RolloutError, match=r"'model\.extra', which vLLM's model does not have"):
        rollout.update_weights({"model.extra": torch.zeros(2)}.items(), version=6)
    with pytest.raises(RolloutError, match="failed half-way"):
        rollout.generate(requests, GREEDY)
    rollout.update_weights(model.named_parameters(), version=7)
    assert tokens(rollout.generate(requests, GREEDY)) == tokens(before)


def test_what_another_client_samples_meanwhile_goes_on_with_the_new_weights(rollout, server, model, tokenizer):
    other = rollout_at(server, model)
    requests = requests_of(tokenizer, 1)
    changed = load_causal_lm(MODEL)
    with torch.no_grad():
        changed.model.embed_tokens.weight.mul_(0.5)
    long = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(other.generate, requests, long)
        time.sleep(0.2)
        rollout.update_weights(changed.named_parameters(), version=8)
        ours = rollout.generate(requests, GREEDY)
        assert {(len(r.token_ids), r.finish_reason) for r in running.result()} == {(200, "length")}
    native = NativeRollout(changed, RolloutConfig(), shares_storage=True)
    assert tokens(ours) == tokens(native.generate(requests, GREEDY))
    rollout.update_weights(model.named_parameters(), version=9)


def test_a_server_that_is_killed_in_mid_response_is_named_in_time(server, model, tokenizer):
    rollout = rollout_at(server, model, max_attempts=2)
    requests = requests_of(tokenizer, 8)
    ends = SamplingParams(max_new_tokens=200, ignore_eos=True)
    first = RolloutRequest("short", requests[0].prompt_ids, "s", sampling=SamplingParams(max_new_tokens=2))
    start = time.perf_counter()
    with pytest.raises(RolloutError, match=r"had no answer in 2 attempts.*1 of 33 requests had been answered"):
        rollout.generate([first, *requests], ends, lambda response: server.end(9))
    assert time.perf_counter() - start < 60
    with pytest.raises(RolloutError, match="There is no server at"):
        rollout_at(server, model, max_start_wait_time=0.0)
