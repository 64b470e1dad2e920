"""What every rollout engine must hold: subclass `RolloutContract`, say how the engine is made, and run pytest."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, PreTrainedModel

from burnish.config import RolloutConfig
from burnish.model.load import build_causal_lm
from burnish.rollout.base import BaseRollout, RolloutRequest, RolloutResponse, SamplingParams
from burnish.utils.errors import RolloutError

VOCAB = 40
MAX_POSITIONS = 64


def tiny_llama(seed: int = 0, *, attn: bool = True, **overrides: Any) -> PreTrainedModel:
    """A random Llama whose next-token distribution is far from uniform."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, **heads, max_position_embeddings=MAX_POSITIONS, initializer_range=0.3, pad_token_id=0, **overrides
    )
    return build_causal_lm(config, seed=seed, attn=attn)


def make_requests(num_prompts: int = 4, n: int = 2, vocab: int = VOCAB, seed: int = 0) -> list[RolloutRequest]:
    """``n`` samples of each of ``num_prompts`` prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for prompt in range(num_prompts):
        ids = torch.randint(3, vocab, (2 + 3 * prompt % 11,), generator=generator).tolist()
        requests += [RolloutRequest(f"{prompt}/{sample}", ids, f"p{prompt}", sample) for sample in range(n)]
    return requests


def assert_same_responses(actual: list[RolloutResponse], expected: list[RolloutResponse]) -> None:
    """The same tokens and reasons; log-probs to 1e-5."""
    assert [r.request_id for r in actual] == [r.request_id for r in expected]
    assert [r.token_ids for r in actual] == [r.token_ids for r in expected]
    assert [r.finish_reason for r in actual] == [r.finish_reason for r in expected]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5, rtol=0)


def assert_log_probs_are_those_of_a_plain_forward(
    model: PreTrainedModel,
    requests: list[RolloutRequest],
    responses: list[RolloutResponse],
    temperature: float = 1.0,
    atol: float = 1e-4,
) -> None:
    """Each response alone, unpadded, through ``model`` with transformers' own attention."""
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=atol, rtol=0)


class GradientWatch(TorchFunctionMode):
    """Notes the functions that compute something which autograd would differentiate; a view of a weight is nothing computed."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.requires_grad and not (result.is_leaf or result._is_view()):
            self.recorded.append(func)
        return result


class RolloutContract:
    """The tests. ``engine_cls`` is all that a subclass must set; `SamplingContract` holds those of sampling parameters."""

    engine_cls: type[BaseRollout]

    def tiny(self, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """The model of the tests; an engine that cannot run this one has another shape of it."""
        return tiny_llama(seed, **overrides)

    def make(self, model: PreTrainedModel | None = None, *, shares_storage: bool = True, **config: Any) -> Any:
        model = self.tiny() if model is None else model
        return self.engine_cls(model, RolloutConfig(**config), shares_storage=shares_storage, device="cpu")  # type: ignore[call-arg]

    sampled = SamplingParams(max_new_tokens=9, temperature=1.3, eos_token_ids=(2, 7), seed=5)

    def test_it_is_a_rollout(self) -> None:
        assert isinstance(self.make(), BaseRollout)

    def test_responses_come_in_the_order_of_the_requests(self) -> None:
        requests = make_requests(5, 3)
        responses = self.make(max_num_seqs=4).generate(requests, self.sampled)
        assert [r.request_id for r in responses] == [r.request_id for r in requests]

    def test_no_requests_give_no_responses(self) -> None:
        assert self.make().generate([], self.sampled) == []

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
    def test_log_probs_are_those_of_softmax_of_logits_over_temperature(self, temperature: float) -> None:
        requests, sampling = make_requests(), SamplingParams(max_new_tokens=6, temperature=temperature, top_k=5)
        responses = self.make().generate(requests, sampling)
        assert_log_probs_are_those_of_a_plain_forward(self.tiny(attn=False), requests, responses, temperature)

    @pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"do_sample": False, "temperature": 0.7}])
    def test_greedy_takes_the_most_likely_token_and_reports_log_probs_at_temperature_one(self, greedy: dict) -> None:
        requests = make_requests()
        responses = self.make().generate(requests, SamplingParams(max_new_tokens=6, **greedy))
        reference = self.tiny(attn=False)
        assert_log_probs_are_those_of_a_plain_forward(reference, requests, responses)
        for request, response in zip(requests, responses, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([[*request.prompt_ids, *response.token_ids]])).logits[0]
            logits = logits[len(request.prompt_ids) - 1 : -1]
            chosen = logits.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
            assert (logits.amax(-1) - chosen <= 1e-4).all()

    def test_a_response_does_not_depend_on_what_else_is_in_the_batch(self) -> None:
        requests = make_requests(5, 3)
        together = self.make(max_num_seqs=256).generate(requests, self.sampled)
        assert_same_responses(self.make(max_num_seqs=3).generate(requests, self.sampled), together)
        assert_same_responses(self.make().generate(requests[::-1], self.sampled)[::-1], together)
        alone = [self.make().generate([request], self.sampled)[0] for request in requests]
        assert_same_responses(alone, together)

    def test_samples_of_a_prompt_differ_and_repeat_with_their_seed(self) -> None:
        requests = make_requests(1, 8)
        engine = self.make()
        first = engine.generate(requests, self.sampled)
        assert len({tuple(r.token_ids) for r in first}) > 4
        assert_same_responses(engine.generate(requests, self.sampled), first)
        other = engine.generate(
            requests, SamplingParams(max_new_tokens=9, temperature=1.3, eos_token_ids=(2, 7), seed=6)
        )
        assert [r.token_ids for r in other] != [r.token_ids for r in first]

    def test_a_response_that_was_cut_goes_on_as_it_would_have_with_its_first_part_as_prompt(self) -> None:
        requests, engine = make_requests(4, 3), self.make()
        sampling = replace(self.sampled, ignore_eos=True)
        whole = engine.generate(requests, sampling)
        rest = engine.generate(
            [
                replace(request, prompt_ids=[*request.prompt_ids, *response.token_ids[:4]])
                for request, response in zip(requests, whole, strict=True)
            ],
            replace(sampling, max_new_tokens=5),
        )
        expected = [replace(r, token_ids=r.token_ids[4:], log_probs=r.log_probs[4:]) for r in whole]
        assert_same_responses(rest, expected)

    def test_sampling_leaves_the_global_generator_and_training_modes_alone(self) -> None:
        model = self.tiny().train()
        state = torch.get_rng_state()
        self.make(model).generate(make_requests(), self.sampled)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in model.modules())
        assert all(parameter.requires_grad for parameter in model.parameters())

    def test_the_model_runs_in_evaluation_mode_and_without_gradients(self) -> None:
        model, requests = self.tiny(attention_dropout=0.5).train(), make_requests()
        engine = self.make(model)
        with GradientWatch() as watch:
            responses = engine.generate(requests, self.sampled)
        assert watch.recorded == []
        assert_same_responses(responses, self.make().generate(requests, self.sampled))

    def test_the_models_own_generation_defaults_do_not_count(self) -> None:
        model, requests = self.tiny(), make_requests()
        expected = self.make(model).generate(requests, self.sampled)
        model.generation_config.update(repetition_penalty=5.0, eos_token_id=5, no_repeat_ngram_size=1, min_new_tokens=9)
        assert_same_responses(self.make(model).generate(requests, self.sampled), expected)
        assert model.generation_config.repetition_penalty == 5.0

    def test_any_of_several_eos_tokens_ends_a_response_and_is_its_last_token(self) -> None:
        sampling = SamplingParams(max_new_tokens=40, temperature=1.5, eos_token_ids=(2, 7, 11))
        responses = self.make().generate(make_requests(6, 6), sampling)
        ends = set()
        for response in responses:
            stops = [token in sampling.eos_token_ids for token in response.token_ids]
            assert not any(stops[:-1])
            assert response.finish_reason == ("stop" if stops[-1] else "length")
            assert len(response.log_probs) == len(response.token_ids) <= 40
            assert stops[-1] or len(response.token_ids) == 40
            ends.update(response.token_ids[-1:] if stops[-1] else [])
        assert ends == {2, 7, 11}

    def test_ignore_eos_goes_on_to_the_limit(self) -> None:
        sampling = SamplingParams(max_new_tokens=20, temperature=1.5, eos_token_ids=(2, 7, 11), ignore_eos=True)
        responses = self.make().generate(make_requests(4, 4), sampling)
        assert {(len(r.token_ids), r.finish_reason) for r in responses} == {(20, "length")}
        assert any(2 in r.token_ids for r in responses)

    def test_on_finished_gets_every_response_exactly_once(self) -> None:
        finished: list[RolloutResponse] = []
        responses = self.make(max_num_seqs=3).generate(make_requests(5, 2), self.sampled, finished.append)
        assert len(finished) == 10
        assert {id(r) for r in finished} == {id(r) for r in responses}

    def test_an_aborted_request_ends_early_with_what_it_has(self) -> None:
        requests, sampling = make_requests(4, 2), SamplingParams(max_new_tokens=20, eos_token_ids=(2,))
        whole = self.make(max_num_seqs=2).generate(requests, sampling)
        engine = self.make(max_num_seqs=2)
        finished: list[RolloutResponse] = []

        def stop_everything(response: RolloutResponse) -> None:
            finished.append(response)
            engine.abort()

        responses = engine.generate(requests, sampling, stop_everything)
        assert responses[-1].finish_reason == "abort"
        assert len(finished) == len(requests)
        for response, full in zip(responses, whole, strict=True):
            assert response.token_ids == full.token_ids[: len(response.token_ids)]
            assert len(response.log_probs) == len(response.token_ids)
        assert_same_responses(engine.generate(requests, sampling), whole)

    def test_aborting_what_does_not_run_is_ignored(self) -> None:
        engine = self.make()
        engine.abort(["0/0"])
        engine.abort()
        responses = engine.generate(make_requests(1, 1), self.sampled, lambda _: engine.abort(["unheard of"]))
        assert responses[0].finish_reason != "abort"

    def test_asleep_it_refuses_and_awake_it_goes_on_as_before(self) -> None:
        engine, requests = self.make(), make_requests()
        before = engine.generate(requests, self.sampled)
        engine.sleep()
        with pytest.raises(RolloutError, match="asleep"):
            engine.generate(requests, self.sampled)
        engine.wake_up()
        assert_same_responses(engine.generate(requests, self.sampled), before)

    def test_weights_of_another_model_make_it_answer_as_that_model(self) -> None:
        other = self.tiny(seed=1)
        engine, requests = self.make(shares_storage=False), make_requests()
        before = engine.generate(requests, self.sampled)
        engine.update_weights(other.named_parameters(), version=3)
        after = engine.generate(requests, self.sampled)
        assert {r.policy_version for r in before} == {0}
        assert {r.policy_version for r in after} == {3}
        assert_same_responses(after, self.make(other).generate(requests, self.sampled))
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert_same_responses(engine.generate(requests, self.sampled), after)

    def test_shared_weights_need_no_copy(self) -> None:
        model, requests = self.tiny(), make_requests()
        engine = self.make(model)
        before = engine.generate(requests, self.sampled)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        engine.update_weights(model.named_parameters(), version=1)
        after = engine.generate(requests, self.sampled)
        assert [r.token_ids for r in after] != [r.token_ids for r in before]
        assert {r.policy_version for r in after} == {1}

    def test_a_stream_of_other_weights_is_refused_where_storage_is_said_to_be_shared(self) -> None:
        with pytest.raises(RolloutError, match=r"model\.embed_tokens\.weight"):
            self.make().update_weights(self.tiny(seed=1).named_parameters(), version=1)

    @pytest.mark.parametrize("shares_storage", [True, False])
    def test_missing_unknown_and_misshapen_weights_are_named(self, shares_storage: bool) -> None:
        model = self.tiny()
        weights = dict(model.named_parameters())
        engine = self.make(model, shares_storage=shares_storage)
        missing = {k: v for k, v in weights.items() if "layers.1.mlp.up" not in k}
        with pytest.raises(RolloutError, match=r"without 'model\.layers\.1\.mlp\.up_proj\.weight'"):
            engine.update_weights(missing.items(), version=1)
        with pytest.raises(RolloutError, match=r"'extra\.weight'"):
            engine.update_weights({**weights, "extra.weight": torch.zeros(1)}.items(), version=1)
        bad = {**weights, "model.norm.weight": torch.zeros(33)}
        with pytest.raises(RolloutError, match=r"'model\.norm\.weight' has shape \[33\], the rollout's \[32\]"):
            engine.update_weights(bad.items(), version=1)
        engine.update_weights(weights.items(), version=2)
        assert {r.policy_version for r in engine.generate(make_requests(), self.sampled)} == {2}

    @pytest.mark.parametrize(
        ("prompt_ids", "message"),
        [
            ([], r"Request 'bad' has an empty prompt"),
            ([5] * (MAX_POSITIONS - 8), r"Request 'bad' asks for 56 prompt tokens .* 65 positions"),
            ([5, VOCAB], r"Request 'bad' holds token id 40"),
            ([5, -1], r"Request 'bad' holds token id -1"),
        ],
    )
    def test_a_request_that_cannot_be_served_is_named(self, prompt_ids: list[int], message: str) -> None:
        requests = [*make_requests(), RolloutRequest("bad", prompt_ids, "p", 0)]
        with pytest.raises(RolloutError, match=message):
            self.make().generate(requests, self.sampled)

    def test_a_prompt_that_just_fits_is_served(self) -> None:
        request = RolloutRequest("fits", [5] * (MAX_POSITIONS - 9), "p", 0)
        assert len(self.make().generate([request], self.sampled)) == 1

    def test_max_model_len_bounds_prompt_and_response(self) -> None:
        with pytest.raises(RolloutError, match="the engine holds 12 a sequence"):
            self.make(max_model_len=12).generate([RolloutRequest("a", [5] * 4, "p", 0)], self.sampled)

    def test_an_id_given_twice_is_refused(self) -> None:
        request = make_requests()[0]
        with pytest.raises(RolloutError, match="'0/0' is given twice"):
            self.make().generate([request, request], self.sampled)

    def test_a_callback_that_raises_leaves_a_usable_engine(self) -> None:
        engine, requests = self.make(max_num_seqs=2), make_requests()
        expected = engine.generate(requests, self.sampled)

        def fail(response: RolloutResponse) -> None:
            raise KeyError(response.request_id)

        with pytest.raises(KeyError):
            engine.generate(requests, self.sampled, fail)
        assert_same_responses(engine.generate(requests, self.sampled), expected)
