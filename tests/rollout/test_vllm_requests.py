"""Requests to vLLM and back, without vLLM."""

import math

import pytest

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.sampler import stream_key
from burnish.rollout.vllm.requests import DRAW, Finished, Prepared, Progress, prepare, to_response
from burnish.utils.errors import RolloutError
from tests.rollout.sampling_contract import letter_tokenizer

REQUEST = RolloutRequest("r", [5, 6, 7], "uid", 3)


def of(sampling: SamplingParams) -> Prepared:
    return prepare(REQUEST, sampling)


def test_what_ends_a_request_is_vllms_and_how_it_is_drawn_is_burnishs() -> None:
    sampling = SamplingParams(
        max_new_tokens=9,
        temperature=0.7,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        min_new_tokens=2,
        eos_token_ids=(2, 7),
        stop_token_ids=(9,),
        seed=5,
    )
    params = of(sampling).params
    # Neither a temperature nor a truncation of vLLM's own.
    assert set(params) == {
        "max_tokens", "stop_token_ids", "ignore_eos", "detokenize", "logprobs", "flat_logprobs", "skip_clone", "extra_args",
    }  # fmt: skip
    assert (params["max_tokens"], params["stop_token_ids"], params["logprobs"]) == (9, [9, 2, 7], 1)
    assert params["extra_args"] == {
        DRAW: {
            "request_id": "r",
            "key": stream_key(5, "uid", 3),
            "temperature": 0.7,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_new_tokens": 2,
            "stop_ids": [9, 2, 7],
            "truncates": True,
        }
    }


def test_greedy_is_temperature_zero_and_ignored_ends_are_none() -> None:
    params = of(SamplingParams(max_new_tokens=4, do_sample=False, ignore_eos=True, eos_token_ids=(2,))).params
    assert params["extra_args"][DRAW]["temperature"] == 0
    assert params["stop_token_ids"] == []
    assert params["logprobs"] == 0


def test_tokens_and_versions_add_up() -> None:
    progress = Progress(of(SamplingParams(max_new_tokens=9)))
    assert progress.take([1, 2], [-0.1, -0.2], None, 3) is None
    assert progress.take([3], [-0.3], None, 3) is None
    assert progress.take([4], [-0.4], None, 4) is None
    response = to_response(progress.finished("length"), 3)
    assert response.token_ids == [1, 2, 3, 4]
    assert response.log_probs == [-0.1, -0.2, -0.3, -0.4]
    assert (response.policy_version, response.policy_versions) == (3, ((3, 3), (4, 1)))
    assert response.truncated_log_probs is None


def test_a_response_of_one_policy_names_it_once() -> None:
    progress = Progress(of(SamplingParams(max_new_tokens=9, top_k=3)))
    progress.take([1, 2], [-0.1, -0.2], [-0.01, -0.02], 6)
    response = to_response(progress.finished("stop", 2), 5)
    assert (response.policy_version, response.policy_versions, response.stop_reason) == (6, (), 2)
    assert response.truncated_log_probs == [-0.01, -0.02]


def test_one_that_has_no_token_is_of_the_policy_at_the_start() -> None:
    response = to_response(Progress(of(SamplingParams(max_new_tokens=9))).finished("abort"), 5)
    assert (response.token_ids, response.policy_version, response.finish_reason) == ([], 5, "abort")


def test_a_stop_string_ends_it_with_the_token_that_completes_it_and_the_rest_is_dropped() -> None:
    tokenizer = letter_tokenizer()
    a, b, c = (tokenizer.token_to_id(text) for text in "abc")
    progress = Progress(of(SamplingParams(max_new_tokens=9, stop=("ab",), top_k=3)), tokenizer)
    assert progress.take([c, a], [-1.0, -2.0], [-0.1, -0.2], 0) is None
    assert progress.take([b, c], [-3.0, math.nan], [-0.3, math.nan], 0) == "ab"
    finished = progress.finished("stop", "ab")
    assert (finished.token_ids, finished.log_probs) == ([c, a, b], [-1.0, -2.0, -3.0])
    assert finished.truncated_log_probs == [-0.1, -0.2, -0.3]
    assert finished.versions == ((0, 3),)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_are_named(bad: float) -> None:
    progress = Progress(of(SamplingParams(max_new_tokens=9)))
    progress.take([1], [-0.1], None, 2)
    with pytest.raises(RolloutError, match=r"not finite, first for request 'r' at position 5\. .* policy version 2 "):
        progress.take([1, 2], [-0.1, bad], None, 2)


def test_a_cut_request_that_has_all_its_tokens_was_not_cut() -> None:
    progress = Progress(of(SamplingParams(max_new_tokens=2)))
    assert progress.abort_or_length == "abort"
    progress.take([1, 2], [-0.1, -0.2], None, 0)
    assert progress.abort_or_length == "length"


def test_only_a_stop_has_a_reason() -> None:
    assert Progress(of(SamplingParams(max_new_tokens=2))).finished("length", 7).stop_reason is None
    assert Finished("r", [], [], None, "abort").versions == ()
