"""What an engine must hold beyond `RolloutContract` to take every sampling parameter; it is tested in the same way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.utils.errors import RolloutError
from tests.rollout.contract import (
    MAX_POSITIONS,
    VOCAB,
    RolloutContract,
    assert_log_probs_are_those_of_a_plain_forward,
    assert_same_responses,
    make_requests,
)

# Three ways to write "ab", a word that begins in one token and ends in another, and the two bytes of an é apart.
_PIECES = [
    "a",
    "b",
    "c",
    "ab",
    "ba",
    "abc",
    "bab",
    "Ġ",
    "aĠ",
    "Ġb",
    "Ċ",
    "ĊĊ",
    "Ã",
    "©",
    "Ã©",
    "<",
    "/",
    "</",
    "a>",
    ">",
]


def letter_tokenizer() -> Tokenizer:
    """Byte-level, for the tiny models' vocabulary."""
    pieces = _PIECES + [f"<{number}>" for number in range(VOCAB - len(_PIECES))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def transformers_processors(sampling: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """What ``generate`` does to logits before it draws, in its order."""
    processors: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens and sampling.end_token_ids:
        ends = list(sampling.end_token_ids)
        processors.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_new_tokens, ends, device="cpu")  # type: ignore[arg-type]
        )
    if not sampling.greedy:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []
        processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        processors += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p > 0 else []
    return LogitsProcessorList(processors)


def drawn_from(
    model: PreTrainedModel, ids: Sequence[int], prompt_length: int, sampling: SamplingParams
) -> torch.Tensor:
    """Log-probs [tokens + 1, vocab] of the distributions that the tokens behind the prompt, and one more, are drawn from."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, prompt_length - 1 :].float()
    processors = transformers_processors(sampling, prompt_length)
    before = [torch.tensor([ids[: prompt_length + place]]) for place in range(len(logits))]
    return torch.cat([processors(ids, row[None]) for ids, row in zip(before, logits, strict=True)]).log_softmax(-1)


def stopped_at(response: RolloutResponse, stops: Sequence[str], tokenizer: Tokenizer, *, after: int = 0) -> int | None:
    """Tokens until the decoded text first holds one of ``stops``, by decoding everything again for each token."""
    for length in range(after + 1, len(response.token_ids) + 1):
        text = tokenizer.decode(response.token_ids[:length])
        earlier = tokenizer.decode(response.token_ids[: length - 1])
        if any(text.count(stop) > earlier.count(stop) for stop in stops):
            return length
    return None


class SamplingContract(RolloutContract):
    """The tests."""

    truncated = SamplingParams(
        max_new_tokens=8,
        temperature=1.2,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.4,
        min_new_tokens=3,
        eos_token_ids=(2, 7, 11),
        seed=4,
    )

    def make_with_tokenizer(self, **config: Any) -> Any:
        return self.engine_cls(
            self.tiny(),
            RolloutConfig(**config),
            shares_storage=True,  # type: ignore[call-arg]
            device="cpu",
            tokenizer=letter_tokenizer(),
        )

    @pytest.mark.parametrize(
        "params",
        [
            {"top_k": 4},
            {"top_p": 0.6},
            {"min_p": 0.2},
            {"repetition_penalty": 1.8},
            {"repetition_penalty": 0.6},
            {"min_new_tokens": 4, "eos_token_ids": (2, 7, 11, 13)},
            {"min_new_tokens": 4, "ignore_eos": True, "eos_token_ids": (2, 7), "stop_token_ids": (13, 20, 21)},
            {"temperature": 0.0, "repetition_penalty": 1.5},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        ],
    )
    def test_truncated_log_probs_are_those_of_what_transformers_draws_from(self, params: dict[str, Any]) -> None:
        sampling = SamplingParams(**{"max_new_tokens": 8, "temperature": 1.3, **params})
        requests, reference = make_requests(5, 3), self.tiny(attn=False)
        responses = self.make().generate(requests, sampling)
        for request, response in zip(requests, responses, strict=True):
            ids = [*request.prompt_ids, *response.token_ids]
            log_probs = drawn_from(reference, ids, len(request.prompt_ids), sampling)[:-1]
            expected = log_probs.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.truncated_log_probs), expected, atol=1e-4, rtol=0)
        # The others are of the policy, whatever was drawn from.
        assert_log_probs_are_those_of_a_plain_forward(reference, requests, responses, sampling.policy_temperature)

    def test_there_are_truncated_log_probs_only_where_something_truncates(self) -> None:
        responses = self.make().generate(make_requests(), self.sampled)
        assert {response.truncated_log_probs for response in responses} == {None}

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.6},
            {"temperature": 1.5, "min_p": 0.15},
            {"temperature": 1.2, "repetition_penalty": 2.0},
            {"top_k": 6, "top_p": 0.8},
            {"min_new_tokens": 1, "eos_token_ids": tuple(range(0, VOCAB, 2))},
        ],
    )
    def test_drawn_tokens_have_the_distribution_that_transformers_draws_from(self, params: dict[str, Any]) -> None:
        sampling, num_draws = SamplingParams(max_new_tokens=1, **params), 4000
        prompt = make_requests(3, 1)[-1].prompt_ids
        requests = [RolloutRequest(str(sample), prompt, "p", sample) for sample in range(num_draws)]
        tokens = [r.token_ids[0] for r in self.make(max_num_seqs=num_draws).generate(requests, sampling)]
        counts = torch.tensor(tokens).bincount(minlength=VOCAB).double()
        expected = num_draws * drawn_from(self.tiny(attn=False), prompt, len(prompt), sampling)[0].double().exp()
        assert not counts[expected == 0].any()
        common = expected >= 5
        counts = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum())
        degrees = int((expected > 0).sum()) - 1
        # The 99.99 % quantile of chi-square (Wilson and Hilferty 1931).
        bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
        assert statistic < bound + 1

    def test_greedy_with_a_penalty_takes_the_tokens_that_transformers_takes(self) -> None:
        requests = make_requests(5, 1)
        sampling = SamplingParams(max_new_tokens=10, temperature=0.0, repetition_penalty=1.6)
        responses = self.make().generate(requests, sampling)
        reference = self.tiny(attn=False)
        for request, response in zip(requests, responses, strict=True):
            ids = torch.tensor([request.prompt_ids])
            whole = reference.generate(  # type: ignore[operator]
                ids, max_new_tokens=10, do_sample=False, repetition_penalty=1.6, eos_token_id=None, pad_token_id=0
            )
            assert whole[0, ids.shape[1] :].tolist() == response.token_ids

    def test_with_every_parameter_a_response_depends_on_nothing_else_in_the_batch(self) -> None:
        requests = make_requests(5, 3)
        together = self.make(max_num_seqs=256).generate(requests, self.truncated)
        assert_same_responses(self.make(max_num_seqs=2).generate(requests, self.truncated), together)
        assert_same_responses(self.make().generate(requests[::-1], self.truncated)[::-1], together)

    def test_requests_of_one_call_may_each_be_drawn_in_a_way_of_their_own(self) -> None:
        ways = [
            None,
            self.truncated,
            SamplingParams(max_new_tokens=3, temperature=0.0),
            SamplingParams(max_new_tokens=12, temperature=0.4, top_p=0.5, seed=9, stop_token_ids=(5, 6, 8, 9)),
            SamplingParams(max_new_tokens=1, top_k=1, repetition_penalty=3.0),
        ]
        requests = [
            replace(request, sampling=ways[number % len(ways)]) for number, request in enumerate(make_requests(8, 3))
        ]
        responses = self.make(max_num_seqs=5).generate(requests, self.sampled)
        alone = [
            self.make().generate([replace(request, sampling=None)], request.sampling or self.sampled)[0]
            for request in requests
        ]
        assert_same_responses(responses, alone)
        for response, other in zip(responses, alone, strict=True):
            assert response.stop_reason == other.stop_reason
            assert (response.truncated_log_probs is None) == (other.truncated_log_probs is None)
            if response.truncated_log_probs is not None:
                mine, theirs = torch.tensor(response.truncated_log_probs), torch.tensor(other.truncated_log_probs)
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)

    def test_the_length_that_a_request_asks_for_itself_is_the_one_that_must_fit(self) -> None:
        own = SamplingParams(max_new_tokens=MAX_POSITIONS)
        with pytest.raises(RolloutError, match=r"Request 'bad' asks for 2 prompt tokens \+ max_new_tokens=64 = 66"):
            self.make().generate([RolloutRequest("bad", [5, 6], "p", 0, own)], self.sampled)
        long = SamplingParams(max_new_tokens=MAX_POSITIONS)
        fits = RolloutRequest("fits", [5, 6], "p", 0, SamplingParams(max_new_tokens=3))
        assert len(self.make().generate([fits], long)[0].token_ids) == 3

    def test_stop_tokens_end_a_response_also_where_the_end_of_sequence_is_ignored(self) -> None:
        sampling = SamplingParams(
            max_new_tokens=30, temperature=1.5, eos_token_ids=(2, 7), ignore_eos=True, stop_token_ids=(11, 13, 17)
        )
        responses = self.make().generate(make_requests(6, 4), sampling)
        stopped = [response for response in responses if response.finish_reason == "stop"]
        assert {response.token_ids[-1] for response in stopped} == {11, 13, 17}
        for response in responses:
            assert not {11, 13, 17} & set(response.token_ids[:-1])
            assert response.stop_reason == (response.token_ids[-1] if response in stopped else None)
        assert any({2, 7} & set(response.token_ids) for response in responses)

    def test_the_end_of_sequence_token_is_the_reason_of_a_stop(self) -> None:
        responses = self.make().generate(make_requests(6, 4), replace(self.sampled, max_new_tokens=30))
        reasons = {(r.finish_reason, r.stop_reason, r.stop_reason in r.token_ids[-1:]) for r in responses}
        assert (
            {("stop", 2, True), ("stop", 7, True)}
            <= reasons
            <= {
                ("stop", 2, True),
                ("stop", 7, True),
                ("length", None, False),
            }
        )

    @pytest.mark.parametrize("min_new_tokens", [1, 5, 12])
    def test_no_response_ends_by_a_token_before_it_has_min_new_tokens(self, min_new_tokens: int) -> None:
        ends = tuple(range(3, 30))
        sampling = SamplingParams(
            max_new_tokens=12, temperature=1.5, eos_token_ids=ends[:14], stop_token_ids=ends[14:], seed=1
        )
        requests, engine = make_requests(4, 4), self.make()
        assert min(len(response.token_ids) for response in engine.generate(requests, sampling)) == 1
        responses = engine.generate(requests, replace(sampling, min_new_tokens=min_new_tokens))
        for response in responses:
            assert not set(ends) & set(response.token_ids[:min_new_tokens])
            assert len(response.token_ids) > min_new_tokens or response.finish_reason == "length"
        assert {r.finish_reason for r in responses} == ({"length"} if min_new_tokens == 12 else {"stop"})

    @pytest.mark.parametrize(
        ("stops", "min_new_tokens"),
        [(("ab",), 0), (("</a>", "\n\n", "c"), 0), (("é",), 0), (("bab", " b", "never here"), 6)],
    )
    def test_a_response_ends_with_the_token_that_completes_a_stop_string(
        self, stops: tuple[str, ...], min_new_tokens: int
    ) -> None:
        sampling = SamplingParams(max_new_tokens=30, temperature=1.5, min_new_tokens=min_new_tokens, seed=2)
        requests, engine, tokenizer = make_requests(4, 4), self.make_with_tokenizer(max_num_seqs=5), letter_tokenizer()
        whole = engine.generate(requests, sampling)
        cut = engine.generate(requests, replace(sampling, stop=stops))
        expected = []
        for response in whole:
            length = stopped_at(response, stops, tokenizer, after=min_new_tokens)
            token_ids, log_probs = response.token_ids[:length], response.log_probs[:length]
            reason = "length" if length is None else "stop"
            expected.append(replace(response, token_ids=token_ids, log_probs=log_probs, finish_reason=reason))
        assert_same_responses(cut, expected)
        for response in cut:
            stopped = response.finish_reason == "stop"
            assert response.stop_reason in stops if stopped else response.stop_reason is None
            assert not stopped or str(response.stop_reason) in tokenizer.decode(response.token_ids)
        assert "stop" in {response.finish_reason for response in cut}

    def test_without_a_tokenizer_stop_strings_are_refused_before_anything_is_sampled(self) -> None:
        finished: list[RolloutResponse] = []
        with pytest.raises(RolloutError, match=r"Request '0/0' has stop=\('ab',\).*tokenizer"):
            self.make().generate(make_requests(), replace(self.sampled, stop=("ab",)), finished.append)
        assert finished == []

    def test_logits_that_are_no_numbers_are_an_error_that_names_a_request_and_the_engine_survives(self) -> None:
        model, requests = self.tiny(), make_requests()
        engine = self.make(model)
        before = engine.generate(requests, self.sampled)
        kept = model.lm_head.weight[3].clone()  # type: ignore[union-attr, index]
        for sampling in (self.sampled, self.truncated, SamplingParams(max_new_tokens=2, temperature=0.0)):
            with torch.no_grad():
                model.lm_head.weight[3] = float("nan")  # type: ignore[union-attr, index, operator]
            with pytest.raises(RolloutError, match=r"logits are not finite.*request '\d/\d'.*policy version 0"):
                engine.generate(requests, sampling)
            with torch.no_grad():
                model.lm_head.weight[3] = kept  # type: ignore[union-attr, index, operator]
            assert_same_responses(engine.generate(requests, self.sampled), before)

    def test_the_policy_versions_of_a_response_account_for_its_tokens(self) -> None:
        engine, requests = self.make(shares_storage=False), make_requests()
        engine.update_weights(self.tiny(seed=1).named_parameters(), version=3)
        for response in engine.generate(requests, self.sampled):
            versions = response.policy_versions or ((response.policy_version, len(response.token_ids)),)
            assert versions == ((3, len(response.token_ids)),)
            assert response.policy_version == 3

    def test_statistics_are_those_of_the_last_call(self) -> None:
        engine, requests = self.make(max_num_seqs=3), make_requests(5, 2)
        engine.generate(make_requests(2, 1), self.sampled)
        responses = engine.generate(requests, self.sampled)
        stats = engine.stats
        assert stats.num_prompt_tokens == sum(len(request.prompt_ids) for request in requests)
        assert 0 < stats.num_prefilled_tokens <= stats.num_prompt_tokens
        assert stats.num_response_tokens == sum(len(response.token_ids) for response in responses)
        assert stats.num_steps >= max(len(response.token_ids) for response in responses)
        assert stats.num_preemptions == sum(response.num_preemptions for response in responses)
        assert 1 <= stats.max_running <= 3
        assert 0 < stats.prefill_seconds + stats.decode_seconds <= stats.seconds
