"""What a client sends reaches the engine, and what the engine samples reaches the client."""

import pytest

from burnish.render import render
from tests.render.fake_tokenizers import CHATML, byte_tokenizer
from tests.rollout.server.fake_engine import log_prob_of
from tests.rollout.server.serving import EOS, MAX_LENGTH, TOKENIZER, answer, ids_of, says, serving

QUESTION = [{"role": "user", "content": "2+2?"}]


def test_a_completion_has_the_text_without_its_stop_token_and_counts_all_tokens():
    with serving(says("4 é")) as server:
        result = server.complete(model="fake", prompt="2+2=", max_tokens=10)
    (choice,) = result["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("4 é", "stop", EOS)
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert "token_ids" not in choice
    assert (result["object"], result["model"]) == ("text_completion", "fake")
    assert result["id"].startswith("cmpl-")
    assert result["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


def test_a_response_that_is_cut_says_length():
    with serving(says("abcdef")) as server:
        (choice,) = server.complete(prompt="x", max_tokens=3)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", None)


def test_left_out_sampling_is_openais_and_the_response_may_fill_the_context():
    with serving(says("a")) as server:
        server.complete(prompt="12345", temperature=None)
    (request,) = server.engine.received
    assert request.sampling.max_new_tokens == MAX_LENGTH - 5
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, -1)
    assert request.sampling.eos_token_ids == (EOS,)
    assert not request.sampling.truncates


def test_every_field_of_sampling_reaches_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": -5,
        "stop_token_ids": [65, 66],
        "ignore_eos": True,
    }
    with serving(says("ab", ends=False)) as server:
        server.complete(prompt="x", **fields, max_tokens=9, min_tokens=2, stop="b")
    (request,) = server.engine.received
    for name, value in fields.items():
        assert getattr(request.sampling, name) == (tuple(value) if isinstance(value, list) else value), name
    assert (request.sampling.max_new_tokens, request.sampling.min_new_tokens) == (9, 2)
    assert request.sampling.stop == ("b",)


def test_temperature_0_is_greedy():
    with serving(says("a")) as server:
        server.complete(prompt="x", temperature=0)
    assert server.engine.received[0].sampling.greedy


def test_choices_are_the_samples_of_each_prompt_in_order():
    def script(request):
        return [*ids_of(f"{request.uid}/{request.sample_index}"), EOS]

    with serving(script) as server:
        result = server.complete(prompt=["first", "second one"], n=3)
    assert [choice["index"] for choice in result["choices"]] == list(range(6))
    assert [choice["text"] for choice in result["choices"]] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert result["usage"]["prompt_tokens"] == len("first") + len("second one")
    assert len({request.request_id for request in server.engine.received}) == 6


def test_a_seed_names_the_random_streams_and_without_one_each_request_has_its_own():
    with serving(says("a")) as server:
        for seed in (3, 3, None, None):
            server.complete(prompt="x", n=2, seed=seed)
    streams = [(r.sampling.seed, r.uid, r.sample_index) for r in server.engine.received]
    assert streams[0:2] == streams[2:4]
    assert len({seed for seed, _, _ in streams}) == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids_of("ab")]),
        (["ab", "c"], [ids_of("ab"), ids_of("c")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [5]], [ids_of("a"), [5]]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_them(prompt, expected):
    with serving(says("a")) as server:
        server.complete(prompt=prompt)
    assert [list(request.prompt_ids) for request in server.engine.received] == expected


def test_token_ids_come_back_where_they_are_asked_for():
    with serving(says("é")) as server:
        (choice,) = server.complete(prompt=[9, 8], return_token_ids=True)["choices"]
        (chat,) = server.chat(prompt_token_ids=[9, 8, 7], return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([9, 8], [*ids_of("é"), EOS])
    assert (chat["prompt_token_ids"], chat["token_ids"]) == ([9, 8, 7], [*ids_of("é"), EOS])


def test_log_probs_of_a_completion_are_of_the_sampled_tokens():
    with serving(says("ab")) as server:
        (choice,) = server.complete(prompt="x", logprobs=0)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "<|im_end|>"],
        "token_logprobs": [log_prob_of(0), log_prob_of(1), log_prob_of(2)],
        "top_logprobs": None,
        "text_offset": [0, 1, 2],
    }


def test_log_probs_of_a_chat_have_the_bytes_of_whole_tokens():
    with serving(says("aé")) as server:
        (choice,) = server.chat(messages=QUESTION, logprobs=True, top_logprobs=0)["choices"]
    first, half, _, end = choice["logprobs"]["content"]
    assert first == {"token": "a", "logprob": log_prob_of(0), "bytes": [97], "top_logprobs": []}
    assert (half["token"], half["bytes"]) == ("\ufffd", None)
    assert (end["token"], end["logprob"]) == ("<|im_end|>", log_prob_of(3))


def test_a_chat_is_rendered_by_the_template_and_answered_by_the_assistant():
    with serving(says("4")) as server:
        result = server.chat(messages=QUESTION, max_completion_tokens=5)
    (choice,) = result["choices"]
    assert choice["message"] == {"role": "assistant", "content": "4"}
    assert result["object"] == "chat.completion"
    (request,) = server.engine.received
    assert list(request.prompt_ids) == render(QUESTION, TOKENIZER)
    assert request.sampling.max_new_tokens == 5


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ mood }}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}"
    "{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(("choice", "shown"), [(None, "[add]"), ("auto", "[add]"), ("none", "")])
def test_tools_and_template_variables_reach_the_template(choice, shown):
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    with serving(says("a"), tokenizer=tokenizer) as server:
        server.chat(messages=QUESTION, tools=TOOLS, tool_choice=choice, chat_template_kwargs={"mood": "!"})
    assert list(server.engine.received[0].prompt_ids) == ids_of(f"{shown}!2+2?")


def test_the_arguments_of_an_earlier_tool_call_reach_the_template_as_an_object():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with serving(says("a"), tokenizer=byte_tokenizer(TOOL_TEMPLATE)) as server:
        server.chat(messages=messages)
    assert list(server.engine.received[0].prompt_ids) == ids_of("2+2?7")


def test_the_answer_ends_before_a_stop_string_and_the_engine_keeps_its_token():
    with serving(says("so: 42\nQ: next")) as server:
        (choice,) = server.complete(prompt="x", stop=["Q:", "zzz"], return_token_ids=True)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("so: 42\n", "stop", "Q:")
    assert choice["token_ids"] == ids_of("so: 42\nQ:")


def test_fields_that_only_openai_reads_or_that_ask_for_nothing_are_taken():
    with serving(says("a")) as server:
        server.complete(prompt="x", user="me", frequency_penalty=0.0, logit_bias={}, best_of=1, echo=False, suffix=None)
        server.chat(messages=QUESTION, user="me", store=False, response_format={"type": "text"})


def test_the_models_are_listed_and_found_by_name():
    with serving(says("a")) as server:
        (card,) = answer(server.call("GET", "/v1/models"))["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", MAX_LENGTH)
        assert answer(server.call("GET", "/v1/models/fake"))["id"] == "fake"
        assert server.call("GET", "/v1/models/other/one").status_code == 404


def test_a_healthy_server_says_so():
    with serving(says("a")) as server:
        assert answer(server.call("GET", "/health")) == {"status": "ok"}


def test_a_tokenizer_that_closes_every_text_does_not_close_the_prompt():
    tokenizer = byte_tokenizer(CHATML, begin=True, end=True)
    with serving(says("a"), tokenizer=tokenizer) as server:
        server.complete(prompt="ab")
    begin = tokenizer.bos_token_id
    assert list(server.engine.received[0].prompt_ids) == [begin, *ids_of("ab")]
