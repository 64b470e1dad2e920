"""`rollout.mode=server` against burnish's own server, over HTTP: one burnish samples, another one asks."""

import pytest
import torch

from burnish.config import RolloutConfig
from burnish.model.attention import plain_attention
from burnish.model.load import eos_token_ids, load_causal_lm
from burnish.render import load_tokenizer
from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.server.app import build_app
from burnish.rollout.server.driver import EngineDriver
from burnish.rollout.server.prompts import ServedModel
from burnish.rollout.vllm.server import ServerRollout
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_log_probs_are_those_of_a_plain_forward
from tests.rollout.server.serving import Server, listening

PROMPTS = ["12+34=", "7*8=", "99-1=", "5+5="]


@pytest.fixture
def rollout(tiny_model_path, monkeypatch):
    """A rollout, the model that it is served from, and requests."""
    model, tokenizer = load_causal_lm(tiny_model_path), load_tokenizer(tiny_model_path)
    engine = NativeRollout(model, RolloutConfig(max_num_seqs=16), shares_storage=False, tokenizer=tokenizer)
    served = ServedModel(
        name="tiny",
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_length=512,
        vocab_size=model.config.vocab_size,
    )
    monkeypatch.setenv("SERVER_KEY", "k")
    with EngineDriver(engine) as driver:
        app = build_app(driver, served, api_key="k")
        with listening(Server(engine, driver, app)) as url:
            config = RolloutConfig(name="vllm", mode="server")
            config.server.url, config.server.model, config.server.api_key_env = [url], "tiny", "SERVER_KEY"
            rollout = ServerRollout(
                config,
                model_path=tiny_model_path,
                model_config=model.config,
                vocab_size=model.config.vocab_size,
                tokenizer=tokenizer,
                dtype=torch.float32,
            )
            ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
            yield (
                rollout,
                model,
                [RolloutRequest(f"{i}/{k}", p, f"p{i}", k) for i, p in enumerate(ids) for k in range(3)],
            )


def test_responses_are_the_engines_with_the_log_probs_of_the_policy(rollout):
    served, model, requests = rollout
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, eos_token_ids=(257,))
    native = NativeRollout(model, RolloutConfig(), shares_storage=True).generate(requests, greedy)
    answers = served.generate(requests, greedy)
    assert [a.token_ids for a in answers] == [n.token_ids for n in native]
    assert [(a.finish_reason, a.stop_reason) for a in answers] == [(n.finish_reason, n.stop_reason) for n in native]
    sampling = SamplingParams(max_new_tokens=20, temperature=1.3, top_k=20, eos_token_ids=(257,), seed=2)
    sampled = served.generate(requests, sampling)
    with plain_attention(model):
        assert_log_probs_are_those_of_a_plain_forward(model, requests, sampled, 1.3)
    assert [r.token_ids for r in served.generate(requests[4:6], sampling)] == [r.token_ids for r in sampled[4:6]]


def test_stop_strings_and_aborts_reach_the_engine(rollout):
    served, _, requests = rollout
    free = SamplingParams(max_new_tokens=300, ignore_eos=True, seed=3)
    stopped = served.generate(
        requests[:1], SamplingParams(max_new_tokens=300, ignore_eos=True, seed=3, stop=("1", "2"))
    )
    assert stopped[0].stop_reason in ("1", "2")
    quick = RolloutRequest("quick", requests[0].prompt_ids, "q", sampling=SamplingParams(max_new_tokens=2))
    answers = served.generate([quick, *requests], free, lambda response: served.abort())
    assert {a.finish_reason for a in answers[1:]} == {"abort"}


def test_it_cannot_be_given_weights_and_says_so(rollout):
    served, model, requests = rollout
    served.update_weights(model.named_parameters(), version=0)
    served.generate(requests[:1], SamplingParams(max_new_tokens=2))
    with pytest.raises(RolloutError, match="cannot be given the weights of policy 1"):
        served.update_weights(model.named_parameters(), version=1)
