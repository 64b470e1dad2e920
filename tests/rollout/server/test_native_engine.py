"""The server over the real engine and the demo's model."""

import asyncio

import httpx2
import pytest

from burnish.config import RolloutConfig
from burnish.model.load import eos_token_ids, load_causal_lm
from burnish.render import load_tokenizer
from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.server.app import build_app
from burnish.rollout.server.driver import EngineDriver
from burnish.rollout.server.prompts import ServedModel
from tests.rollout.server.serving import Server

PROMPTS = ["12+34=", "7*8=", "99-1=", "a", "5+5="]


@pytest.fixture
def tiny(tiny_model_path):
    """The engine and what the server says of it."""
    model, tokenizer = load_causal_lm(tiny_model_path), load_tokenizer(tiny_model_path)
    engine = NativeRollout(model, RolloutConfig(max_num_seqs=8), shares_storage=False, tokenizer=tokenizer)
    eos = eos_token_ids(model, tokenizer)
    served = ServedModel(
        name="tiny", tokenizer=tokenizer, eos_token_ids=eos, max_length=512, vocab_size=model.config.vocab_size
    )
    return engine, served


def generated(engine, served, prompts, **sampling) -> list:
    params = SamplingParams(eos_token_ids=served.eos_token_ids, **sampling)
    ids = [served.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return engine.generate([RolloutRequest(str(i), prompt, str(i)) for i, prompt in enumerate(ids)], params)


def test_greedy_answers_are_the_engines_own(tiny):
    engine, served = tiny
    expected = generated(engine, served, PROMPTS, max_new_tokens=12, temperature=0)
    with EngineDriver(engine) as driver:
        server = Server(engine, driver, build_app(driver, served))
        result = server.complete(prompt=PROMPTS, max_tokens=12, temperature=0, return_token_ids=True, logprobs=0)
        events = server.stream("/v1/completions", prompt=PROMPTS, max_tokens=12, temperature=0, return_token_ids=True)
    for choice, response in zip(result["choices"], expected, strict=True):
        assert choice["token_ids"] == response.token_ids
        assert choice["finish_reason"] == response.finish_reason
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(response.log_probs, abs=1e-5)
        pieces = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece["token_ids"]] == response.token_ids
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert engine.cache_bytes == 0


def test_a_seeded_answer_does_not_depend_on_who_else_asks(tiny):
    engine, served = tiny
    seeded = {"prompt": "12+34=", "n": 3, "seed": 11, "max_tokens": 20, "return_token_ids": True}

    async def run(app) -> list:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            bodies = [seeded, *({"prompt": text, "max_tokens": 30, "n": 4} for text in PROMPTS), seeded]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [*answers, await client.post("/v1/completions", json=seeded)]

    with EngineDriver(engine) as driver:
        answers = asyncio.run(run(build_app(driver, served)))
    tokens = [[choice.get("token_ids") for choice in answer.json()["choices"]] for answer in answers]
    assert tokens[0] == tokens[-2] == tokens[-1]
    assert len(tokens[0]) == 3


def test_a_stop_string_ends_the_text_and_sampling_is_what_was_asked(tiny):
    engine, served = tiny
    with EngineDriver(engine) as driver:
        server = Server(engine, driver, build_app(driver, served))
        body = {"prompt": "1+2+3+4", "max_tokens": 200, "ignore_eos": True, "seed": 3, "return_token_ids": True}
        (free,) = server.complete(**body)["choices"]
        # One character: between two, this model may write special tokens, which are not in the text.
        stop = next(character for character in free["text"] if character != free["text"][0])
        (cut,) = server.complete(**body, stop=stop)["choices"]
        (many,) = server.complete(**{**body, "stop_token_ids": list(range(20)), "max_tokens": 5})["choices"]
    assert len(free["token_ids"]) == 200
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert many["finish_reason"] in ("stop", "length")


def test_the_largest_and_oddest_values_that_are_taken_do_not_end_the_engine(tiny):
    engine, served = tiny
    odd = [
        {"temperature": 1e-4},
        {"temperature": 1000, "top_p": 1e-30},
        {"repetition_penalty": 100, "temperature": 1e-4},
        {"repetition_penalty": 0.01},
        {"top_k": 10**30},
        {"min_p": 1, "top_k": 1, "top_p": 1e-9},
        {"min_tokens": 8, "max_tokens": 8, "stop": ["1", "2"], "stop_token_ids": list(range(262))[:64]},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 40},
    ]
    with EngineDriver(engine) as driver:
        server = Server(engine, driver, build_app(driver, served))
        for fields in odd:
            server.complete(**{"prompt": [0], "max_tokens": 8, **fields})
        assert server.call("GET", "/health").status_code == 200


def test_a_chat_goes_through_the_models_template(tiny):
    engine, served = tiny
    with EngineDriver(engine) as driver:
        server = Server(engine, driver, build_app(driver, served))
        result = server.chat(messages=[{"role": "user", "content": "3+4="}], temperature=0, max_tokens=8)
    (choice,) = result["choices"]
    assert choice["finish_reason"] == "stop"
    assert "<|" not in choice["message"]["content"]
