"""Sampling parameters outside their range are refused, and tell what follows from those inside it."""

from typing import Any

import pytest

from burnish.rollout.base import SamplingParams
from burnish.utils.errors import RolloutError

NAN = float("nan")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a number of at least 0; 0 decodes greedily"),
        ({"temperature": NAN}, "temperature=nan must be a number"),
        ({"temperature": float("inf")}, "temperature=inf must be a number"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1; 1 keeps every token"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0"),
        ({"top_p": NAN}, "top_p=nan must be above 0"),
        ({"top_k": -2}, "top_k=-2 must be at least 1, or -1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0 and 1; 0 keeps every token"),
        ({"min_p": NAN}, "min_p=nan must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0; 1 is none"),
        ({"repetition_penalty": NAN}, "repetition_penalty=nan must be above 0"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must be between 0 and max_new_tokens=8"),
        ({"min_new_tokens": 9}, "min_new_tokens=9 must be between 0 and max_new_tokens=8"),
        ({"stop": "</s>"}, r"stop='</s>' must be a tuple of strings"),
        ({"stop": ("a", "")}, r"none of them empty"),
        ({"stop": (5,)}, r"stop=\(5,\) must be a tuple of strings"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_the_rule(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        SamplingParams(**{"max_new_tokens": 8, **params})


@pytest.mark.parametrize(
    ("params", "truncates"),
    [
        ({}, False),
        ({"temperature": 0.3}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_new_tokens": 2}, False),  # There is no token that could end the response.
        ({"min_new_tokens": 2, "eos_token_ids": (1,), "ignore_eos": True}, False),
        ({"min_new_tokens": 2, "eos_token_ids": (1,)}, True),
        ({"min_new_tokens": 2, "stop_token_ids": (1,), "ignore_eos": True}, True),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.5}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, True),
    ],
)
def test_what_truncates_is_what_changes_the_distribution_that_is_drawn_from(params: dict, truncates: bool) -> None:
    assert SamplingParams(max_new_tokens=8, **params).truncates is truncates


def test_stop_tokens_and_ends_of_sequence_end_a_response_and_the_latter_may_be_ignored() -> None:
    ends: dict[str, Any] = {"max_new_tokens": 8, "eos_token_ids": (1, 2), "stop_token_ids": (2, 3)}
    assert sorted(SamplingParams(**ends).end_token_ids) == [1, 2, 3]
    assert SamplingParams(**ends, ignore_eos=True).end_token_ids == (2, 3)
