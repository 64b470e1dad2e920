"""A stream is the whole answer in pieces."""

import threading

import httpx2
import pytest

from burnish.rollout.server.app import build_app
from burnish.rollout.server.driver import EngineDriver
from tests.rollout.server.fake_engine import FakeEngine, log_prob_of
from tests.rollout.server.serving import EOS, Server, ids_of, listening, says, served_model, serving

TEXT = "one € two 😀 three"
QUESTION = [{"role": "user", "content": "2+2?"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def joined(events: list[dict], index: int = 0) -> dict:
    """What a client makes of the chunks of one choice."""
    result: dict = {"text": "", "token_ids": [], "finish_reason": None, "prompt_token_ids": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert result["finish_reason"] is None, "nothing follows the end"
            result["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            result["token_ids"] += choice.get("token_ids", [])
            result["prompt_token_ids"] = result["prompt_token_ids"] or choice.get("prompt_token_ids")
            result["finish_reason"] = choice["finish_reason"]
            result["stop_reason"] = choice["stop_reason"]
    return result


@pytest.mark.parametrize("per_round", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, {"stop": ["two", "xx"]}, {"max_tokens": 6}, {"stop": ["zzz", "threes"]}])
def test_the_pieces_of_a_completion_are_the_whole(per_round, options):
    body = {"prompt": "x", "n": 2, "return_token_ids": True, **options}
    with serving(says(TEXT), per_round=per_round) as server:
        whole = server.complete(**body)
        events = server.stream(COMPLETIONS, **body)
    for choice in whole["choices"]:
        pieces = joined(events, choice["index"])
        for name in ("text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"):
            assert pieces[name] == choice[name], name
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"text_completion"}


def test_the_pieces_of_a_chat_are_the_whole_and_begin_with_the_role():
    with serving(says(TEXT)) as server:
        events = server.stream(CHAT, messages=QUESTION)
    assert joined(events)["text"] == TEXT
    roles = [choice["delta"].get("role") for event in events for choice in event["choices"]]
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_no_chunk_holds_half_a_character_or_the_beginning_of_a_stop_string():
    with serving(says(TEXT)) as server:
        events = server.stream(COMPLETIONS, prompt="x", stop=["three"])
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == "one € two 😀 "
    assert not any("\ufffd" in text for text in texts)


def test_usage_comes_last_and_only_where_it_is_asked_for():
    with serving(says("abc")) as server:
        events = server.stream(COMPLETIONS, prompt=["x", "yy"], n=2, stream_options={"include_usage": True})
        assert not any("usage" in event for event in server.stream(COMPLETIONS, prompt="x"))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert all(event["usage"] is None for event in events[:-1])


def test_log_probs_come_with_their_tokens_also_while_the_text_is_held_back():
    with serving(says("a€")) as server:
        chat = server.stream(CHAT, messages=QUESTION, logprobs=True)
        completion = server.stream(COMPLETIONS, prompt="x", logprobs=0)
    entries = [entry for e in chat for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert [entry["logprob"] for entry in entries] == [log_prob_of(place) for place in range(5)]
    log_probs = [e["choices"][0]["logprobs"] for e in completion if e["choices"][0]["logprobs"]]
    assert [x for entry in log_probs for x in entry["token_logprobs"]] == [log_prob_of(place) for place in range(5)]
    assert [x for entry in log_probs for x in entry["text_offset"]] == [0, 1, 2, 3, 4]


def test_tokens_arrive_while_the_response_grows():
    rounds: list[None] = []
    may_end = threading.Event()

    def script(request):
        if rounds:  # From the second round on: nothing more before the test says so.
            may_end.wait(timeout=60)
        rounds.append(None)
        return [*ids_of("ab"), EOS]

    with (
        serving(script) as server,
        listening(server) as url,
        httpx2.stream("POST", url + CHAT, json={"messages": QUESTION, "stream": True}, timeout=30) as response,
    ):
        lines = response.iter_lines()
        assert '"content":"a"' in next(lines)
        may_end.set()
        rest = list(lines)
    assert '"content":"b"' in "".join(rest)
    assert [line for line in rest if line][-1] == "data: [DONE]"


class LateEngine(FakeEngine):
    """Reports tokens one round late, so that the last ones come with the response alone."""

    def open_session(self, *, on_tokens, on_finished):
        before: dict[str, tuple] = {}

        def late(request_id, *news):
            if request_id in before:
                on_tokens(request_id, *before[request_id])
            before[request_id] = news

        return super().open_session(on_tokens=late, on_finished=on_finished)


def test_tokens_that_the_engine_reports_only_with_the_response_are_not_lost():
    with EngineDriver(LateEngine(says("abc"))) as driver:
        server = Server(driver._engine, driver, build_app(driver, served_model()))
        pieces = joined(server.stream(COMPLETIONS, prompt="x", return_token_ids=True))
    assert (pieces["text"], pieces["token_ids"]) == ("abc", [*ids_of("abc"), EOS])
