"""What cannot be served is answered at once by a sentence, in the shape of OpenAI's errors, and troubles nobody else."""

import json

import pytest

from tests.render.fake_tokenizers import byte_tokenizer
from tests.rollout.server.serving import MAX_LENGTH, says, serving

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response) -> dict:
    body = response.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    # A sentence: it ends, or quotes another's words.
    assert len(error["message"]) > 10
    return error


WRONG = [
    ({"prompt": "x" * 500}, "prompt", f"500 tokens, but the model holds {MAX_LENGTH}"),
    ({"prompt": "x" * MAX_LENGTH}, "prompt", f"{MAX_LENGTH} tokens"),
    ({"prompt": "x" * 190, "max_tokens": 11}, "max_tokens", "lower max_tokens to 10"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "Prompt 1 is empty"),
    ({"prompt": [[1], []]}, "prompt", "Prompt 1 is empty"),
    ({}, "prompt", "no prompt"),
    ({"prompt": 7}, "prompt", "7"),
    ({"prompt": {"a": 1}}, "prompt", "text or a list of token ids"),
    ({"prompt": [1, "a", None]}, "prompt", "text or a list of token ids"),
    ({"prompt": [1, True]}, "prompt", "text or a list of token ids"),
    ({"prompt": [1, 10**30]}, "prompt", "token id 1000000"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "max_tokens=1.5"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "max_tokens=true"),
    ({"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens=4"),
    ({"prompt": "x", "min_tokens": 500}, "min_tokens", "199 tokens that the prompt leaves"),
    ({"prompt": "x", "temperature": -1}, "temperature", "temperature=-1"),
    ({"prompt": "x", "temperature": 1e-9}, "temperature", "0 decodes greedily"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", '"hot"'),
    ({"prompt": "x", "top_p": 0}, None, "top_p=0"),
    ({"prompt": "x", "top_p": 1.5}, None, "top_p=1.5"),
    ({"prompt": "x", "top_k": -7}, None, "top_k=-7"),
    ({"prompt": "x", "min_p": 2}, None, "min_p=2"),
    ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty", "repetition_penalty=1e-300"),
    ({"prompt": "x", "n": 0}, "n", "n=0"),
    ({"prompt": "x", "n": 10**9}, "n", "n=1000000000"),
    ({"prompt": ["x"] * 4000, "n": 2}, "n", "split the request"),
    ({"prompt": "x", "stop": ""}, "stop.0", "stop.0"),
    ({"prompt": "x", "stop": ["a"] * 100}, "stop", "at most 64"),
    ({"prompt": "x", "stop": [1]}, "stop.0", "stop.0=1"),
    ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"prompt": "x", "stop_token_ids": [-2]}, "stop_token_ids", "-2"),
    ({"prompt": "x", "seed": 2**70}, "seed", "seed="),
    ({"prompt": "x", "logprobs": 3}, "logprobs", "logprobs=0"),
    ({"prompt": "x", "echo": True}, "echo", "echo=true is not supported"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "suffix"),
    ({"prompt": "x", "best_of": 4}, "best_of", "best_of=4"),
    ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty=0.5"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
    ({"prompt": "x", "temprature": 1}, "temprature", "Did you mean temperature?"),
    ({"prompt": "x", "messages": []}, "messages", "does not know the field messages"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "field stream_options.usage",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_wrong_completion_request_is_answered_by_a_sentence(body, param, words):
    with serving(says("a")) as server:
        response = server.call("POST", COMPLETIONS, json=body)
        error = error_of(response)
        assert response.status_code == 400
        assert words in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert server.engine.received == []


WRONG_CHATS = [
    ({"messages": []}, "empty"),
    ({}, "either messages or prompt_token_ids"),
    ({"messages": MESSAGES, "prompt_token_ids": [1]}, "either messages or prompt_token_ids"),
    ({"messages": "hi"}, "messages="),
    ({"messages": [{"content": "x"}]}, "no 'role'"),
    ({"messages": [{"role": "user", "content": None}]}, "nothing (null)"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, f"the model holds {MAX_LENGTH}"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs=2"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "none and auto"),
    ({"messages": MESSAGES, "tool_choice": {"type": "function"}}, "none and auto"),
    ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False}}, "may not hold tokenize"),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "two names"),
    ({"messages": MESSAGES, "max_completion_tokens": 500}, "max_completion_tokens"),
    ({"prompt_token_ids": [], "max_tokens": 3}, "empty"),
    ({"prompt_token_ids": [1], "tools": [{"type": "function"}]}, "no effect"),
    ({"messages": MESSAGES, "prompt": "x"}, "does not know the field prompt"),
]


@pytest.mark.parametrize(("body", "words"), WRONG_CHATS, ids=[words for _, words in WRONG_CHATS])
def test_a_wrong_chat_request_is_answered_by_a_sentence(body, words):
    with serving(says("a")) as server:
        response = server.call("POST", CHAT, json=body)
        assert response.status_code == 400
        assert words in error_of(response)["message"]
        assert server.engine.received == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'["prompt"]',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_answered_by_a_sentence(body):
    with serving(says("a")) as server:
        response = server.call("POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert "JSON" in error_of(response)["message"]


def test_a_body_of_another_kind_is_refused():
    """A web page may send text/plain to this machine's ports without being asked."""
    with serving(says("a")) as server:
        for headers in ({"Content-Type": "text/plain"}, {}):
            response = server.call("POST", COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
            assert response.status_code == 415
            assert "application/json" in error_of(response)["message"]


def test_a_huge_body_is_refused(monkeypatch):
    monkeypatch.setattr("burnish.rollout.server.app._MAX_BODY_BYTES", 1000)
    with serving(says("a")) as server:
        response = server.call("POST", COMPLETIONS, json={"prompt": "x" * 2000})
        assert response.status_code == 413
        error_of(response)


def test_an_unknown_model_is_named():
    with serving(says("a")) as server:
        response = server.call("POST", COMPLETIONS, json={"model": "gpt", "prompt": "x"})
    error = error_of(response)
    assert response.status_code == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt'" in error["message"]
    assert "'fake'" in error["message"]


def test_unknown_paths_and_methods_have_the_same_shape():
    with serving(says("a")) as server:
        unknown, wrong = server.call("GET", "/v1/embeddings"), server.call("GET", COMPLETIONS)
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert "/v1/completions" in error_of(unknown)["message"]
    assert "GET" in error_of(wrong)["message"]


def test_a_model_without_chat_template_serves_completions_only():
    with serving(says("a"), tokenizer=byte_tokenizer(None)) as server:
        response = server.call("POST", CHAT, json={"messages": MESSAGES})
        assert response.status_code == 400
        assert "no chat template" in error_of(response)["message"]
        server.complete(prompt="x")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"]
)
def test_what_a_chat_template_refuses_is_the_clients_mistake(template):
    with serving(says("a"), tokenizer=byte_tokenizer(template)) as server:
        response = server.call("POST", CHAT, json={"messages": MESSAGES})
        assert response.status_code == 400
        assert "chat template" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_the_engines_sentence_and_a_status(stream):
    with serving(says("a"), refuse=lambda request: "The cache is too small.") as server:
        response = server.call("POST", COMPLETIONS, json={"prompt": "x", "stream": stream})
        assert response.status_code == 400
        assert error_of(response)["message"] == "The cache is too small."
        server.engine.refuse = lambda request: None
        server.complete(prompt="x")


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "secret-é", "Basic secret-é", "Bearer secret-é2"])
def test_a_wrong_key_opens_nothing_but_health(header):
    headers = {} if header is None else {"Authorization": header.encode()}
    with serving(says("a"), api_key="secret-é") as server:
        for method, path in (("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/fake")):
            response = server.call(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = error_of(response)
            assert error["code"] == "invalid_api_key"
            assert "secret" not in json.dumps(error)
        assert server.call("GET", "/health").status_code == 200


def test_the_right_key_opens_all():
    with serving(says("a"), api_key="secret-é") as server:
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} secret-é".encode()}
            assert server.call("POST", COMPLETIONS, json={"prompt": "x"}, headers=headers).status_code == 200


def test_nothing_else_is_served():
    with serving(says("a"), api_key="k") as server:
        for path in ("/docs", "/redoc", "/openapi.json", "/"):
            assert server.call("GET", path).status_code == 404
