"""A vLLM engine in processes of its own: what happens while it runs, and when it dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="vLLM is not installed")

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams, WeightStream
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints
from tests.rollout.contract import make_requests
from tests.rollout.sampling_contract import letter_tokenizer
from tests.vllm.in_process_engines import tiny_vllm_llama
from tests.vllm.process_engines import FEW, ProcessEngines, describe, start_core

LONG = SamplingParams(max_new_tokens=50, temperature=1.3, seed=5)


def native(requests: list[RolloutRequest], sampling: SamplingParams, seed: int = 0) -> list[RolloutResponse]:
    """What the native engine answers."""
    return NativeRollout(tiny_vllm_llama(seed), RolloutConfig(), shares_storage=True).generate(requests, sampling)


def fingerprints(model: PreTrainedModel) -> dict[str, int]:
    """Of every weight, by name."""
    found = Fingerprints()
    for name, parameter in model.named_parameters():
        found.add(name, parameter)
    return found.read()


def assert_same(actual: list[RolloutResponse], expected: list[RolloutResponse]) -> None:
    """The same tokens and reasons; log-probs as two implementations of long responses have them."""
    for a, b in zip(actual, expected, strict=True):
        assert (a.request_id, a.token_ids, a.finish_reason) == (b.request_id, b.token_ids, b.finish_reason)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=5e-5, rtol=0)


def test_it_answers_token_for_token_as_the_native_engine(process_engines: ProcessEngines) -> None:
    requests = make_requests(7, 4)
    rollout = process_engines.rollout(tiny_vllm_llama())
    assert_same(rollout.generate(requests, LONG), native(requests, LONG))
    stats = rollout.stats
    assert stats.num_response_tokens == 28 * 50
    assert 50 <= stats.num_steps <= 60
    assert stats.max_running == 28
    assert 0 < stats.num_prefilled_tokens <= stats.num_prompt_tokens
    assert stats.cache_bytes > 0
    assert 0 < stats.prefill_seconds + stats.decode_seconds <= stats.seconds


def test_a_response_is_handed_over_while_others_run(process_engines: ProcessEngines) -> None:
    rollout = process_engines.rollout(tiny_vllm_llama())
    requests = [
        RolloutRequest(f"r{i}", [5, 6, 7], f"p{i}", 0, replace(LONG, max_new_tokens=2 if i == 0 else 50))
        for i in range(4)
    ]
    running_then: list[set[str]] = []
    processor = rollout.core._engine.output_processor  # type: ignore[attr-defined]

    def finish(response: RolloutResponse) -> None:
        if response.request_id == "r0":
            rollout.abort(["r1"])
            running_then.append({state.external_req_id for state in list(processor.request_states.values())})

    responses = rollout.generate(requests, LONG, finish)
    assert running_then[0] == {"r1", "r2", "r3"}
    assert responses[1].finish_reason == "abort"
    assert len(responses[1].token_ids) < 50
    assert [len(r.token_ids) for r in responses[2:]] == [50, 50]


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["all at the end", "token by token"])
def test_a_pause_lets_other_weights_in_and_every_token_keeps_its_version(
    process_engines: ProcessEngines, stop: tuple[str, ...]
) -> None:
    rollout = process_engines.rollout(tiny_vllm_llama(), letter_tokenizer())
    sampling = replace(LONG, stop=stop)
    requests = [
        RolloutRequest(f"r{i}", [5, 6, 7 + i], f"p{i}", 0, replace(sampling, max_new_tokens=10 if i == 0 else 50))
        for i in range(5)
    ]
    other = tiny_vllm_llama(seed=1)

    def update() -> None:
        rollout.pause()
        rollout.update_weights(other.named_parameters(), version=9)
        rollout.resume()

    updater = threading.Thread(target=update)

    def finish(response: RolloutResponse) -> None:
        if response.request_id == "r0":
            updater.start()
            time.sleep(0.02)

    responses = rollout.generate(requests, sampling, finish)
    updater.join()
    changed = [response for response in responses if response.policy_versions]
    assert len(changed) == 4
    for request, response in zip(requests[1:], responses[1:], strict=True):
        (old, before), (new, after) = response.policy_versions
        assert (old, new, before + after) == (0, 9, 50)
        assert before >= 10
        first = native([replace(request, sampling=replace(LONG, max_new_tokens=before))], LONG)[0]
        assert response.token_ids[:before] == first.token_ids
        # The rest is what the other policy goes on with, keys and values of the first part being its own too.
        rest = replace(
            request,
            prompt_ids=[*request.prompt_ids, *first.token_ids],
            sampling=replace(LONG, max_new_tokens=after),
        )
        (second,) = native([rest], LONG, seed=1)
        assert response.token_ids[before:] == second.token_ids
        torch.testing.assert_close(
            torch.tensor(response.log_probs), torch.tensor([*first.log_probs, *second.log_probs]), atol=5e-5, rtol=0
        )


def test_weights_that_came_through_shared_memory_are_those_that_were_sent(process_engines: ProcessEngines) -> None:
    rollout, model = process_engines.rollout(tiny_vllm_llama()), tiny_vllm_llama(seed=3)
    rollout.update_weights(model.named_parameters(), version=4)
    assert rollout.weights_checksum() == fingerprints(model)


def test_an_update_that_fails_is_named_and_the_next_one_arrives(process_engines: ProcessEngines) -> None:
    rollout, requests = process_engines.rollout(tiny_vllm_llama()), make_requests()

    def broken() -> WeightStream:
        yield from list(tiny_vllm_llama(seed=1).named_parameters())[:4]
        raise KeyError("of the trainer")

    with pytest.raises(KeyError, match="of the trainer"):
        rollout.update_weights(broken(), version=1)
    with pytest.raises(RolloutError, match="of no one policy"):
        rollout.generate(requests, LONG)
    rollout.update_weights(tiny_vllm_llama().named_parameters(), version=2)
    assert_same(rollout.generate(requests, LONG), native(requests, LONG))


def test_an_engine_that_hangs_is_ended_and_named_within_the_timeout(
    process_engines: ProcessEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = process_engines.rollout(tiny_vllm_llama(), max_num_seqs=FEW)
    core = rollout.core
    monkeypatch.setattr(core, "_timeout", 3.0)
    monkeypatch.setattr(core._watch, "_timeout", 3.0)
    stopped: list[float] = []

    def stop(response: RolloutResponse) -> None:
        if not stopped:
            stopped.append(time.monotonic())
            os.kill(core.processes[0].pid, signal.SIGSTOP)

    with pytest.raises(RolloutError, match="no answer for 3 s.*engine_timeout"):
        rollout.generate(make_requests(10, 4), LONG, stop)
    assert time.monotonic() - stopped[0] < 20


def test_an_engine_that_dies_in_mid_rollout_is_named_at_once_and_another_one_can_be_made(
    process_engines: ProcessEngines,
) -> None:
    # Also behind the test above, which has ended the engine before.
    rollout, requests = process_engines.rollout(tiny_vllm_llama(), max_num_seqs=FEW), make_requests(10, 4)
    assert_same(rollout.generate(requests[:4], LONG), native(requests[:4], LONG))
    core, killed = rollout.core, list[float]()

    def kill(response: RolloutResponse) -> None:
        if not killed:
            killed.append(time.monotonic())
            os.kill(core.processes[0].pid, signal.SIGKILL)

    with pytest.raises(
        RolloutError, match=rf"process {core.processes[0].pid} .* signal SIGKILL.* from its last checkpoint"
    ):
        rollout.generate(requests, LONG, kill)
    assert time.monotonic() - killed[0] < 20
    for attempt in (
        lambda: rollout.generate(requests, LONG),
        lambda: rollout.update_weights(tiny_vllm_llama().named_parameters(), 1),
        rollout.weights_checksum,
    ):
        with pytest.raises(RolloutError, match="SIGKILL"):
            attempt()
    rollout.close()


def test_an_engine_that_does_not_start_says_what_its_log_says(tmp_path: Path) -> None:
    model = tiny_vllm_llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(RolloutError, match=r"vLLM did not start with .*: .*(SafetensorError|[Hh]eader)"):
        start_core(str(tmp_path), model=model)


def test_two_tensor_parallel_workers_take_the_same_weights_and_draw_the_same_tokens(tmp_path: Path) -> None:
    core = start_core(str(tmp_path), num_workers=2)
    rollout = VLLMRollout(describe(str(tmp_path)), RolloutConfig(mode="async"), core=core)
    try:
        for seed in (1, 2):
            rollout.update_weights(tiny_vllm_llama(seed).named_parameters(), version=seed)
            assert rollout.weights_checksum() == fingerprints(tiny_vllm_llama(seed))
        requests = make_requests()
        assert_same(rollout.generate(requests, LONG), native(requests, LONG, seed=2))
    finally:
        rollout.close()


PROGRAM = """
import os, sys
from tests.vllm.process_engines import start_core

if __name__ == "__main__":
    core = start_core(sys.argv[1])
    print("processes", *(process.pid for process in core.processes), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_an_engine_ends_when_the_process_that_drives_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": repository},
        stdout=subprocess.PIPE,
        check=False,
    )
    (line,) = [line for line in done.stdout.decode().splitlines() if line.startswith("processes")]
    deadline = time.monotonic() + 20
    while any(_lives(int(pid)) for pid in line.split()[1:]):
        assert time.monotonic() < deadline, "the engine outlived the process that drove it"
        time.sleep(0.2)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
