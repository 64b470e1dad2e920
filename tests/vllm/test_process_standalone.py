"""Engines in processes and pools of their own whose weights come over the network: here gloo, on GPUs NCCL."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="vLLM is not installed")

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.standalone import EngineProcess, Publisher, StandaloneRollout
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints
from tests.rollout.contract import make_requests
from tests.vllm.in_process_engines import tiny_vllm_llama
from tests.vllm.process_engines import ProcessEngines, describe, make_standalone

SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.3, seed=5)


def native_tokens(requests: list[RolloutRequest], seed: int) -> list[list[int]]:
    engine = NativeRollout(tiny_vllm_llama(seed), RolloutConfig(), shares_storage=True)
    return [response.token_ids for response in engine.generate(requests, SAMPLED)]


def tokens(responses: list[RolloutResponse]) -> list[list[int]]:
    return [response.token_ids for response in responses]


def fingerprints(model: PreTrainedModel) -> dict[str, int]:
    found = Fingerprints()
    for name, parameter in model.named_parameters():
        found.add(name, parameter)
    return found.read()


def test_an_engine_that_shares_no_memory_gets_its_weights_by_broadcast(
    process_engines: ProcessEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, requests = process_engines.rollout(tiny_vllm_llama()), make_requests()
    monkeypatch.setattr(rollout.core, "_transport", "broadcast")
    for seed in (1, 2):
        rollout.update_weights(tiny_vllm_llama(seed).named_parameters(), version=seed)
        assert rollout.weights_checksum() == fingerprints(tiny_vllm_llama(seed))
        assert tokens(rollout.generate(requests, SAMPLED)) == native_tokens(requests, seed)

    def broken() -> Any:
        yield from list(tiny_vllm_llama().named_parameters())[:4]
        raise KeyError("of the trainer")

    with pytest.raises(KeyError, match="of the trainer"):
        rollout.update_weights(broken(), version=3)
    rollout.update_weights(tiny_vllm_llama(3).named_parameters(), version=4)
    assert tokens(rollout.generate(requests, SAMPLED)) == native_tokens(requests, 3)


class Neighbour:
    """A `Remote` of a rollout in this process."""

    def __init__(self, rollout: StandaloneRollout) -> None:
        self.rollout = rollout

    def call(self, method: str, *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(getattr(self.rollout, method)(*args))
            except Exception as error:  # noqa: BLE001  Raised by whoever waits.
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def check(self) -> None:
        pass


@pytest.fixture(scope="module")
def standalone(process_engines: ProcessEngines) -> Iterator[EngineProcess]:
    describe(process_engines.folder)
    engine = EngineProcess(make_standalone, process_engines.folder)
    yield engine
    engine.close()


def test_two_engines_in_two_pools_get_the_weights_of_one_broadcast(
    process_engines: ProcessEngines, standalone: EngineProcess
) -> None:
    other = Neighbour(StandaloneRollout(describe(process_engines.folder), RolloutConfig(), core=process_engines.core()))
    publisher, requests = (
        Publisher([standalone, other], "cpu", torch.float32, bucket_bytes=20_000, timeout_s=60),
        make_requests(),
    )
    try:
        for seed in (1, 2):
            publisher.update_weights(tiny_vllm_llama(seed).named_parameters(), version=seed)
            assert publisher.weights_checksum() == fingerprints(tiny_vllm_llama(seed))
            expected = native_tokens(requests, seed)
            for engine in (standalone, other.rollout):
                responses = engine.generate(requests, SAMPLED)
                assert tokens(responses) == expected
                assert {response.policy_version for response in responses} == {seed}
    finally:
        publisher.close()


def test_a_standalone_engine_is_updated_in_the_middle_of_its_responses(standalone: EngineProcess) -> None:
    publisher = Publisher([standalone], "cpu", torch.float32, timeout_s=60)
    publisher.update_weights(tiny_vllm_llama().named_parameters(), version=1)
    requests = make_requests(8, 8)
    came: list[float] = []

    def update() -> None:
        standalone.call("pause").result(60)
        publisher.update_weights(tiny_vllm_llama(1).named_parameters(), version=2)
        standalone.call("resume").result(60)

    updater = threading.Thread(target=update)

    def finish(response: RolloutResponse) -> None:
        came.append(time.monotonic())

    threading.Timer(0.05, updater.start).start()
    responses = standalone.generate(requests, SAMPLED, finish)
    assert len(came) == len(requests)
    for response in responses:
        versions = response.policy_versions or ((response.policy_version, len(response.token_ids)),)
        assert [version for version, _ in versions] in ([1], [1, 2], [2])
        assert sum(count for _, count in versions) == len(response.token_ids)
    updater.join()
    publisher.close()
    with pytest.raises(RolloutError, match="'nonsense'"):
        standalone.generate([RolloutRequest("nonsense", [], "p")], SAMPLED)


def test_weights_that_the_engine_does_not_know_are_named_and_the_next_ones_arrive(standalone: EngineProcess) -> None:
    publisher = Publisher([standalone], "cpu", torch.float32, timeout_s=60)
    weights = dict(tiny_vllm_llama(2).named_parameters())
    with pytest.raises(RolloutError, match=r"'extra\.weight'"):
        publisher.update_weights({**weights, "extra.weight": torch.zeros(2)}.items(), version=1)
    with pytest.raises(RolloutError, match=r"without 'model\.norm\.weight'"):
        publisher.update_weights({n: t for n, t in weights.items() if n != "model.norm.weight"}.items(), version=1)
    with pytest.raises(RolloutError, match="of no one policy"):
        standalone.generate(make_requests(), SAMPLED)
    publisher.update_weights(weights.items(), version=2)
    assert publisher.weights_checksum() == fingerprints(tiny_vllm_llama(2))
    publisher.close()


def test_a_standalone_engine_that_dies_is_named_by_whoever_waits_for_it(standalone: EngineProcess) -> None:
    publisher = Publisher([standalone], "cpu", torch.float32, timeout_s=30)

    def die(response: RolloutResponse) -> None:
        if standalone.process.is_alive():
            os.kill(standalone.process.pid, signal.SIGKILL)

    many = [RolloutRequest(f"r{i}", [5, 6, 7], f"p{i}") for i in range(400)]
    with pytest.raises(RolloutError, match="SIGKILL"):
        standalone.generate(many, SAMPLED, die)
    with pytest.raises(RolloutError, match="SIGKILL"):
        publisher.update_weights(tiny_vllm_llama().named_parameters(), version=1)
    publisher.close()
