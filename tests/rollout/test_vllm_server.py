"""Responses from a server elsewhere: what it is asked, what it may answer, and every way in which it goes wrong."""

import logging
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from burnish.config import RolloutConfig
from burnish.config.rollout import ServerConfig
from burnish.rollout.base import BaseRollout, RolloutRequest, SamplingParams
from burnish.rollout.vllm.server import ServerRollout
from burnish.rollout.vllm.server_facts import check_served
from burnish.utils.errors import ConfigError, RolloutError
from tests.rollout.fake_api_server import VOCAB, FakeApi, slowly, waits_until

EOS = 40
SAMPLING = SamplingParams(max_new_tokens=4, eos_token_ids=(EOS,), seed=5)


def requests_of(*firsts: int, n: int = 1) -> list[RolloutRequest]:
    return [RolloutRequest(f"{first}/{k}", [first, 1], f"p{first}", k) for first in firsts for k in range(n)]


def rollout_at(*urls: str, tokenizer=None, path: str = "folder/model", **server) -> ServerRollout:
    config = RolloutConfig(name="vllm", mode="server")
    config.server.url = list(urls)
    for name, value in {"retry_delay": 0.01, "timeout": 20.0, "max_start_wait_time": 0.0, **server}.items():
        setattr(config.server, name, value)
    model_config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=None))
    return ServerRollout(
        config, model_path=path, model_config=model_config, vocab_size=VOCAB, tokenizer=tokenizer, dtype=torch.float32
    )


@pytest.fixture
def api():
    fake = FakeApi()
    with fake.running() as url:
        fake.url = url
        yield fake


def test_responses_come_in_the_order_of_the_requests_with_reasons_and_log_probs(api):
    engine = rollout_at(api.url)
    assert isinstance(engine, BaseRollout)
    assert engine.generate([], SAMPLING) == []
    finished = []
    responses = engine.generate(requests_of(38, 3, 10), SAMPLING, finished.append)
    assert [r.token_ids for r in responses] == [[39, 40], [4, 5, 6, 7], [11, 12, 13, 14]]
    assert [(r.finish_reason, r.stop_reason) for r in responses] == [("stop", EOS), ("length", None), ("length", None)]
    assert [r.log_probs for r in responses] == [[-1.0] * 2, [-1.0] * 4, [-1.0] * 4]
    assert {id(r) for r in finished} == {id(r) for r in responses}
    assert engine.stats.num_response_tokens == 10


def test_all_that_decides_about_a_response_is_said_and_nothing_is_left_to_the_servers_defaults(api):
    engine = rollout_at(api.url)
    sampling = SamplingParams(
        max_new_tokens=7, min_new_tokens=2, temperature=0.7, top_p=0.8, top_k=9, min_p=0.1, repetition_penalty=1.2,
        eos_token_ids=(EOS,), stop_token_ids=(41,), stop=("x",),
    )  # fmt: skip
    engine.generate(requests_of(3), sampling)
    (body,) = api.asked
    assert body["prompt"] == [3, 1]
    assert {name: body[name] for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")} == {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.1,
    }  # fmt: skip
    assert (body["repetition_penalty"], body["ignore_eos"], set(body["stop_token_ids"])) == (1.2, True, {EOS, 41})
    assert (body["stop"], body["skip_special_tokens"], body["model"]) == (["x"], False, "model")
    engine.generate(requests_of(3), SamplingParams(max_new_tokens=1, temperature=0.0, top_p=0.5, top_k=3, min_p=0.2))
    greedy = api.asked[-1]
    assert [greedy[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [0.0, 1.0, -1, 0.0]


def test_a_seed_belongs_to_a_sample_and_not_to_the_batch(api):
    engine = rollout_at(api.url)
    engine.generate(requests_of(3, 4, n=3), SAMPLING)
    seeds = {tuple(body["prompt"]): [] for body in api.asked}
    for body in api.asked:
        seeds[tuple(body["prompt"])].append(body["seed"])
    assert len({seed for of_prompt in seeds.values() for seed in of_prompt}) == 6
    assert all(0 <= seed < 2**63 for of_prompt in seeds.values() for seed in of_prompt)
    engine.generate(requests_of(4, n=1), SAMPLING)
    assert api.asked[-1]["seed"] in seeds[4, 1]


def test_samples_of_a_prompt_go_to_one_of_several_servers(api):
    other = FakeApi()
    with other.running() as url:
        rollout_at(api.url, url).generate(requests_of(*range(12), n=2), SAMPLING)
    ours, theirs = ({body["prompt"][0] for body in fake.asked} for fake in (api, other))
    assert ours
    assert theirs
    assert not ours & theirs


def test_no_more_than_max_connections_are_asked_for_at_once(api):
    deadline = time.monotonic() + 20

    def wait_for_three(number, body):
        while api.max_at_once < 3 and time.monotonic() < deadline and body.get("stream"):
            time.sleep(0.001)
        time.sleep(0.01)

    api.on_request = wait_for_three
    rollout_at(api.url, max_connections=3).generate(requests_of(*range(10)), SAMPLING)
    assert api.max_at_once == 3


def test_the_key_is_sent_and_one_that_is_missing_is_named(api, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    rollout_at(f"{api.url}/v1/", api_key_env="MY_KEY")
    assert {headers["Authorization"] for headers in api.headers} == {"Bearer secret"}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"server\.api_key_env=MY_KEY"):
        rollout_at(api.url, api_key_env="MY_KEY")


# What the server has.


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://host", "http://host:port"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"http://host:8000"):
        rollout_at(url)


def test_where_nobody_answers_the_address_and_the_key_are_named(api):
    closed = FakeApi()
    with closed.running() as url:
        pass
    with pytest.raises(
        RolloutError, match=rf"no server at actor_rollout_ref.rollout.server.url={url}.*refused.*Start it"
    ):
        rollout_at(url)
    with pytest.raises(RolloutError, match=r"no server at .*no-such-host\.invalid"):
        rollout_at("http://no-such-host.invalid:1", max_start_wait_time=60.0)


def test_the_drivers_check_finds_what_each_address_serves(api):
    served = ServerConfig(url=[api.url], max_start_wait_time=0.0)
    check_served(served, "folder/model", None)
    with pytest.raises(RolloutError, match=r"serves 'model', which is not the name of .*other"):
        check_served(served, "some/other", None)
    assert not api.bodies  # Only the list of models was asked for.
    with pytest.raises(ConfigError, match=r"server\.url=http://localhost:8000"):
        check_served(ServerConfig(), "folder/model", None)


def test_a_server_that_is_still_starting_is_waited_for(api):
    starting = [503, 503]
    cards = {"data": [api.card]}
    api.routes["/v1/models"] = lambda _: (starting.pop(), {}) if starting else (200, cards)
    rollout_at(api.url, max_start_wait_time=20.0).generate(requests_of(3), SAMPLING)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"detail": "Not Found"}), "no server of OpenAI's API"),
        ((200, b"<html>"), "did not answer in JSON but: '<html>'"),
        ((200, {"models": []}), "lists no models"),
        ((401, {"error": {"message": "Who are you?"}}), "wants a key .*Who are you?"),
    ],
)
def test_what_is_no_such_server_is_said(api, answer, words):
    api.routes["/v1/models"] = lambda _: answer
    with pytest.raises(RolloutError, match=words):
        rollout_at(api.url)


def test_a_model_of_another_name_is_refused_unless_it_is_said_to_be_the_same(api):
    with pytest.raises(RolloutError, match=r"serves 'model', which is not the name of .*other.*server\.model=model"):
        rollout_at(api.url, path="some/other")
    rollout_at(api.url, path="some/other", model="model")
    with pytest.raises(RolloutError, match=r"server\.model=third: .* serves 'model'"):
        rollout_at(api.url, model="third")
    api.card["root"] = "/elsewhere/other"
    rollout_at(api.url, path="some/other")


def test_a_model_of_a_smaller_vocabulary_is_refused_at_the_start(api):
    message = {"error": {"message": "Token id 49 is out of vocabulary"}}
    api.on_request = lambda number, body: (400, message) if max(body["prompt"]) >= 45 else None
    with pytest.raises(RolloutError, match=r"refuses token 49, the last of the 50 .*another model.*out of vocabulary"):
        rollout_at(api.url)


def test_another_tokenizer_is_refused_at_the_start(api):
    def tokenizer(text):
        return {"input_ids": [1, 2, 3] if is_same else [1, 2]}

    tokenizer.eos_token_id, is_same = EOS, True
    rollout_at(api.url, tokenizer=tokenizer)
    is_same = False
    with pytest.raises(RolloutError, match=r"as 3 tokens \[1, 2, 3\].*as 2 tokens.* is another model"):
        rollout_at(api.url, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": None}, "returned no token ids"),
        ({"logprobs": None}, "without log-probs"),
        ({"logprobs": {"token_logprobs": [None]}}, "without log-probs"),
        ({"logprobs": {"token_logprobs": [-1.0, -1.0]}}, "1 tokens with 2 log-probs"),
    ],
)
def test_a_server_without_token_ids_or_log_probs_is_refused_at_the_start(api, change, words):
    api.change = lambda choice: {**choice, **change}
    with pytest.raises(RolloutError, match=words):
        rollout_at(api.url)


# What its log-probs are those of.

_KINDS = {
    "raw": lambda body: -1.0,
    "processed": lambda body: 0.0 if body.get("top_k") == 1 else -1.0,
    "policy": lambda body: -1.0 * body["temperature"],
}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_kind_of_log_probs_is_found_out(api, kind):
    api.log_prob = _KINDS[kind]
    assert rollout_at(api.url)._servers[0].log_probs == kind


@pytest.mark.parametrize(
    ("kind", "sampling", "is_known"),
    [
        ("raw", {}, True),
        ("raw", {"temperature": 0.0}, True),
        ("raw", {"top_p": 0.9}, True),
        ("raw", {"temperature": 0.7}, False),
        ("processed", {"temperature": 0.7}, True),
        ("processed", {"temperature": 0.7, "top_k": 5}, False),
        ("policy", {"temperature": 0.7, "top_k": 5}, True),
    ],
)
def test_log_probs_that_are_not_the_policys_are_not_passed_off_as_them(api, caplog, kind, sampling, is_known):
    api.log_prob = _KINDS[kind]
    engine = rollout_at(api.url)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (response,) = engine.generate(requests_of(3), SamplingParams(max_new_tokens=2, **sampling))
    assert all(map(math.isfinite, response.log_probs)) == is_known
    assert len([line for line in caplog.messages if "They are NaN" in line]) == (not is_known)
    of_draw = kind == "processed" and "top_k" in sampling
    assert response.truncated_log_probs == ([-1.0, -1.0] if of_draw else None)


# What goes wrong.


def test_a_connection_that_breaks_is_tried_again_and_the_response_is_whole(api):
    api.cut_after = lambda number: 2 if number == 1 else None
    (response,) = rollout_at(api.url).generate(requests_of(3), SAMPLING)
    assert response.token_ids == [4, 5, 6, 7]
    assert len(response.log_probs) == 4
    first, second = api.asked
    assert first == second


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_too_busy_is_asked_again(api, status):
    api.on_request = lambda number, body: (status, {"error": {"message": "busy"}}) if 0 < number < 3 else None
    (response,) = rollout_at(api.url, max_attempts=3).generate(requests_of(3), SAMPLING)
    assert response.finish_reason == "length"
    assert len(api.asked) == 3


def test_a_server_that_dies_is_named_with_what_it_had_answered(api):
    api.cut_after = lambda number: 1 if number > 2 else None
    engine = rollout_at(api.url, max_attempts=2, max_connections=1)
    words = r"Request '5/0' had no answer in 2 attempts .*2 of 4 requests had been answered.* from its last checkpoint"
    with pytest.raises(RolloutError, match=words):
        engine.generate(requests_of(3, 4, 5, 6), SAMPLING)
    api.cut_after = lambda number: None
    assert len(engine.generate(requests_of(3, 4), SAMPLING)) == 2


def test_a_server_that_falls_silent_is_given_up_after_the_timeout(api):
    go = threading.Event()
    api.on_request = waits_until(go)
    engine = rollout_at(api.url, timeout=0.2, max_attempts=2, retry_delay=0.0)
    start = time.perf_counter()
    with pytest.raises(RolloutError, match=r"sent nothing for 0\.2 s"):
        engine.generate(requests_of(3), SAMPLING)
    assert time.perf_counter() - start < 5
    go.set()


def test_one_that_never_comes_to_an_end_is_given_up_too(api):
    api.change = slowly(0.05)
    engine = rollout_at(api.url, timeout=0.4, max_attempts=1)
    with pytest.raises(RolloutError, match="had no answer in 1 attempts"):
        engine.generate(requests_of(3), SamplingParams(max_new_tokens=60, eos_token_ids=(EOS,), ignore_eos=True))


def test_an_error_in_the_middle_of_a_stream_is_tried_again(api):
    failing = [True]
    engine = rollout_at(api.url)
    api.change = lambda choice: {"error": {"message": "CUDA error"}} if failing and failing.pop() else choice
    (response,) = engine.generate(requests_of(3), SAMPLING)
    assert (response.token_ids, len(api.asked)) == ([4, 5, 6, 7], 2)
    api.change = lambda choice: {"error": {"message": "CUDA error"}}
    with pytest.raises(RolloutError, match="failed at request '3/0': CUDA error"):
        engine.generate(requests_of(3), SAMPLING)


def test_a_response_that_the_server_gave_up_is_none(api):
    engine = rollout_at(api.url)
    api.change = lambda choice: {**choice, "finish_reason": choice["finish_reason"] and "abort"}
    with pytest.raises(RolloutError, match="with the reason 'abort'"):
        engine.generate(requests_of(3), SAMPLING)
    assert len(api.asked) == 3


def test_a_refusal_is_told_in_the_servers_words_and_not_repeated(api):
    engine = rollout_at(api.url)
    api.on_request = lambda number, body: (400, {"error": {"message": "max_tokens is too large."}})
    with pytest.raises(RolloutError, match=r"Request '3/0' was refused.*400 Bad Request: max_tokens is too large\."):
        engine.generate(requests_of(3), SAMPLING)
    assert len(api.asked) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [VOCAB]}, r"'3/0' with token 50, but the model has 50: it has another model"),
        ({"token_ids": None}, "returned no token ids"),
        ({"prompt_token_ids": [0, 3, 1]}, r"another prompt than that of request '3/0': it made 3 tokens of the 2"),
        ({"token_ids": [4] * 3, "logprobs": {"token_logprobs": [-1.0] * 3}}, "more than the max_new_tokens=4"),
        ({"logprobs": {"token_logprobs": [math.inf]}}, "not finite"),
    ],
)
def test_an_answer_that_cannot_be_the_models_is_an_error(api, change, words):
    engine = rollout_at(api.url)
    api.change = lambda choice: {**choice, **change}
    with pytest.raises(RolloutError, match=words):
        engine.generate(requests_of(3), SAMPLING)


def test_a_prompt_and_response_that_the_server_cannot_hold_are_refused_before_it_is_asked(api):
    engine = rollout_at(api.url)
    with pytest.raises(RolloutError, match="the engine holds 64 a sequence"):
        engine.generate([RolloutRequest("a", [3] * 61, "p")], SAMPLING)
    with pytest.raises(RolloutError, match="token id 50"):
        engine.generate([RolloutRequest("a", [VOCAB], "p")], SAMPLING)
    assert api.asked == []


# Abort, sleep, callbacks.


def test_an_aborted_request_ends_early_with_what_it_has_and_the_server_hears_of_it(api):
    engine = rollout_at(api.url)
    api.change = slowly(0.02)
    threading.Timer(0.3, lambda: engine.abort(["3/0"])).start()
    (response,) = engine.generate(requests_of(3), SamplingParams(max_new_tokens=60))
    assert response.finish_reason == "abort"
    assert 0 < len(response.token_ids) < 60
    assert response.token_ids == list(range(4, 4 + len(response.token_ids)))
    assert len(response.log_probs) == len(response.token_ids)
    assert api.broken_off.wait(5)


def test_abort_of_all_ends_those_that_wait_for_a_connection_too(api):
    engine = rollout_at(api.url, max_connections=1)
    api.change = slowly(0.005)
    finished = []

    def stop_everything(response):
        finished.append(response)
        engine.abort()

    responses = engine.generate(requests_of(3, 4, 5, 6), SAMPLING, stop_everything)
    assert responses[-1].finish_reason == "abort"
    assert len(finished) == 4
    assert [r.finish_reason for r in engine.generate(requests_of(3), SAMPLING)] == ["length"]


def test_a_callback_that_raises_breaks_the_others_off_and_leaves_a_usable_rollout(api):
    engine = rollout_at(api.url)
    api.change = slowly(0.01)

    def fail(response):
        raise KeyError(response.request_id)

    with pytest.raises(KeyError):
        engine.generate(requests_of(3, 38), SAMPLING, fail)
    assert len(engine.generate(requests_of(3, 38), SAMPLING)) == 2


def test_asleep_it_refuses(api):
    engine = rollout_at(api.url)
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate(requests_of(3), SAMPLING)
    engine.wake_up()
    assert len(engine.generate(requests_of(3), SAMPLING)) == 1
