"""`VLLMRollout` around a core that only pretends: order of calls, sleep, weights and aborts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.base import BaseRollout, RolloutRequest, SamplingParams, WeightStream
from burnish.rollout.vllm.arguments import VLLMModel
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.placement import IdleCore, engine_gpus
from burnish.rollout.vllm.requests import Finished, Prepared
from burnish.utils.errors import RolloutError
from tests.rollout.contract import make_requests, tiny_llama

SAMPLING = SamplingParams(max_new_tokens=3)


class FakeCore(IdleCore):
    """Answers every request with one token, one after the other, and notes what it is asked."""

    def __init__(self, fingerprints: Sequence[dict[str, int]] = ({},)) -> None:
        self.asked: list[Any] = []
        self.names: list[str] = []
        self.prepared: list[Prepared] = []
        self._fingerprints = list(fingerprints)

    def run(
        self,
        requests: Sequence[Prepared],
        on_finished: Callable[[Finished], None],
        take_aborts: Callable[[], set[str]],
    ) -> None:
        self.prepared = list(requests)
        for request in reversed(requests):
            aborted = request.request_id in take_aborts()
            ids = [] if aborted else [7]
            on_finished(Finished(request.request_id, ids, [-0.5] * len(ids), None, "abort" if aborted else "length"))

    def call(self, method: str, *args: Any) -> list[Any]:
        self.asked.append((method, *args))
        return self._fingerprints if method == "fingerprints" else [None]

    def send(self, stream: WeightStream, bucket_bytes: int, version: int = 0) -> None:
        self.asked.append(("send", bucket_bytes, version))
        self.names = [name for name, _ in stream]

    def sleep(self, level: int) -> None:
        self.asked.append(("sleep", level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.asked.append(("wake_up", tags))


def make(
    core: FakeCore | None = None, *, device: str = "cpu", adapters: dict[str, Any] | None = None, **keys: Any
) -> tuple[VLLMRollout, FakeCore]:
    core = FakeCore() if core is None else core
    model = VLLMModel(path="nowhere", config=tiny_llama().config, dtype=torch.float32)
    config = RolloutConfig(**{"mode": "sync", **keys})
    return VLLMRollout(model, config, device=device, adapters=adapters, core=core), core


def weights(model: PreTrainedModel | None = None) -> dict[str, torch.Tensor]:
    return dict((model or tiny_llama()).named_parameters())


def test_it_is_a_rollout_that_keeps_a_copy() -> None:
    engine, _ = make()
    assert isinstance(engine, BaseRollout)
    assert not engine.shares_storage
    assert engine.needs_base


def test_responses_come_in_the_order_of_the_requests_and_callbacks_in_that_of_their_ends() -> None:
    (engine, _), requests, ended = make(), make_requests(3, 1), []
    responses = engine.generate(requests, SAMPLING, lambda response: ended.append(response.request_id))
    assert [r.request_id for r in responses] == [r.request_id for r in requests]
    assert ended == [r.request_id for r in reversed(requests)]


def test_an_abort_from_a_callback_reaches_what_has_not_ended() -> None:
    engine, _ = make()
    responses = engine.generate(make_requests(3, 1), SAMPLING, lambda _: engine.abort(["0/0"]))
    assert [r.finish_reason for r in responses] == ["abort", "length", "length"]


def test_a_request_that_cannot_be_served_is_refused_before_the_engine_hears_of_any() -> None:
    engine, core = make()
    with pytest.raises(RolloutError, match="'bad' has an empty prompt"):
        engine.generate([*make_requests(), RolloutRequest("bad", [], "p")], SAMPLING)
    assert core.prepared == []


def test_weights_go_to_the_engine_in_buckets_of_the_keys_size_with_their_version() -> None:
    engine, core = make()
    engine.update_weights(weights().items(), version=4)
    assert core.asked == [("send", 256 << 20, 4)]
    assert core.names == list(weights())
    assert engine.policy_version == 4
    assert not engine.needs_base


def test_a_stream_that_breaks_leaves_an_engine_that_refuses_until_the_next_update() -> None:
    engine, _ = make()
    with pytest.raises(RolloutError, match="'unheard.of'"):
        engine.update_weights({**weights(), "unheard.of": torch.zeros(1)}.items(), version=1)
    with pytest.raises(RolloutError, match="of no one policy"):
        engine.generate(make_requests(), SAMPLING)
    engine.update_weights(weights().items(), version=2)
    assert {r.policy_version for r in engine.generate(make_requests(), SAMPLING)} == {2}


def test_either_name_of_a_tied_pair_will_do() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    described = VLLMModel(path="nowhere", config=model.config, dtype=torch.float32)
    engine = VLLMRollout(described, RolloutConfig(mode="sync"), core=FakeCore())
    named = weights(model)
    assert "lm_head.weight" not in named
    engine.update_weights(named.items(), version=1)
    embeddings = named.pop("model.embed_tokens.weight")
    engine.update_weights({**named, "lm_head.weight": embeddings}.items(), version=2)
    with pytest.raises(RolloutError, match=r"without 'model\.embed_tokens\.weight' and 0 other"):
        engine.update_weights(named.items(), version=3)


def adapter_weights() -> dict[str, torch.Tensor]:
    name = "model.layers.0.self_attn.q_proj"
    return {f"{name}.lora_A.weight": torch.zeros(2, 32), f"{name}.lora_B.weight": torch.zeros(32, 2)}


def test_adapters_come_behind_their_base_the_first_time_and_alone_later() -> None:
    engine, core = make(adapters={"r": 2})
    assert core.asked == [("use_adapters", {"r": 2})]
    with pytest.raises(RolloutError, match="before 'model.embed_tokens.weight' of its base"):
        engine.update_weights(adapter_weights().items(), version=1)
    with pytest.raises(RolloutError, match="held none"):
        engine.update_weights(weights().items(), version=1)
    engine.update_weights({**weights(), **adapter_weights()}.items(), version=2)
    assert not engine.needs_base
    engine.update_weights(adapter_weights().items(), version=3)
    engine.generate(make_requests(), SAMPLING)
    assert all(prepared.with_adapters for prepared in core.prepared)


def test_an_engine_on_a_cpu_only_refuses_while_it_sleeps() -> None:
    engine, core = make()
    engine.sleep(level=2)
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(make_requests(), SAMPLING)
    engine.wake_up()
    assert core.asked == []
    assert not engine.lost_weights
    assert len(engine.generate(make_requests(), SAMPLING)) == 8


def test_on_a_gpu_an_update_wakes_the_weights_and_the_rest_sleeps_on() -> None:
    engine, core = make(device="cuda")
    engine.update_weights(weights().items(), version=1)
    engine.sleep(level=2)
    assert engine.lost_weights
    assert engine.needs_base
    engine.update_weights(weights().items(), version=2)
    assert not engine.lost_weights
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(make_requests(), SAMPLING)
    engine.wake_up()
    engine.generate(make_requests(), SAMPLING)
    engine.wake_up()  # Nothing is asleep any more.
    bucket = 256 << 20
    assert core.asked == [
        ("send", bucket, 1), ("sleep", 2), ("wake_up", ["weights"]), ("send", bucket, 2), ("wake_up", ["kv_cache"]),
    ]  # fmt: skip


def test_an_engine_that_forgot_its_weights_does_not_sample() -> None:
    engine, _ = make(device="cuda")
    engine.update_weights(weights().items(), version=1)
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(RolloutError, match="forgot its weights"):
        engine.generate(make_requests(), SAMPLING)


def test_it_wakes_up_by_parts() -> None:
    engine, core = make(device="cuda")
    engine.sleep()
    engine.wake_up(["weights"])
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(make_requests(), SAMPLING)
    engine.wake_up(["kv_cache"])
    engine.generate(make_requests(), SAMPLING)
    assert core.asked == [("sleep", 1), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    with pytest.raises(RolloutError, match=r"'cache' is none of \['kv_cache', 'weights'\]"):
        engine.wake_up(["cache"])


def test_an_engine_that_is_to_keep_its_memory_keeps_it() -> None:
    engine, core = make(device="cuda", free_cache_engine=False)
    engine.sleep(level=2)
    engine.wake_up()
    assert core.asked == []


def test_ranks_that_hold_different_weights_are_an_error() -> None:
    engine, _ = make(FakeCore([{"a": 1, "b": 2}, {"a": 1, "b": 3}]))
    with pytest.raises(RolloutError, match="rank 1 holds other values of 'b'"):
        engine.weights_checksum()
    assert make(FakeCore([{"a": 1}, {"a": 1}]))[0].weights_checksum() == {"a": 1}


def test_a_rank_for_which_another_one_answers_reads_the_weights_and_answers_nothing() -> None:
    read: list[str] = []

    def stream() -> WeightStream:
        for name, tensor in weights().items():
            read.append(name)
            yield name, tensor

    model = VLLMModel(path="nowhere", config=tiny_llama().config, dtype=torch.float32)
    engine = VLLMRollout(model, RolloutConfig(), core=IdleCore())
    engine.update_weights(stream(), version=1)
    assert read == list(weights())
    assert engine.weights_checksum() is None
    responses = engine.generate(make_requests(2, 1), SAMPLING)
    assert [(r.request_id, r.token_ids, r.finish_reason) for r in responses] == [
        ("0/0", [], "abort"),
        ("1/0", [], "abort"),
    ]


def test_the_gpus_of_one_rank_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_gpus(1, torch.device("cpu")) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_gpus(1, torch.device("cuda", 3)) == ["3"]
    assert engine_gpus(2, torch.device("cuda", 0)) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc")
    assert engine_gpus(1, torch.device("cuda", 1)) == ["GPU-abc"]
    assert engine_gpus(2, torch.device("cuda", 0)) == ["5", "GPU-abc"]
