import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.reward.functions import arithmetic, gsm8k
from burnish.reward.functions.answer import last_boxed, last_number, only_number, truth_numbers
from burnish.utils.errors import RewardError

# The response, and its strict and flexible score for the truth 1234.
TABLE = [
    ("#### 1234", 1, 1),
    ("#### 1,234", 1, 1),
    ("#### $1234", 1, 1),
    ("#### $1,234.00", 1, 1),
    ("#### 1234.", 1, 1),
    ("#### 1234.00", 1, 1),
    ("####1234", 1, 1),
    ("#### 1234 apples", 1, 1),
    ("#### 1\nno wait\n#### 1234", 1, 1),
    ("#### 1234\nno wait\n#### 1", 0, 0),
    ("#### -1234", 0, 0),
    ("#### −1234", 0, 0),
    ("#### 1234.5", 0, 0),
    ("#### 12345", 0, 0),
    ("#### about 1234", 0, 1),
    ("##### 1234", 0, 1),
    (r"The answer is \boxed{1234}", 0, 1),
    (r"The answer is \boxed{1{,}234}.", 0, 1),
    (r"The answer is \boxed{\text{\$}1234} after 5 days", 0, 1),
    (r"\boxed{1234} and then \boxed{5", 0, 1),
    (r"\boxed{\frac{1}{1234}}", 0, 0),
    (r"#### 7 no, \boxed{1234}", 0, 1),
    ("The answer is 1234.", 0, 1),
    ("1234 of 5", 0, 0),
    ("１２３４", 0, 1),
    ("I do not know", 0, 0),
    ("", 0, 0),
]


@pytest.mark.parametrize(("response", "strict", "flexible"), TABLE)
@pytest.mark.parametrize("truth", ["1234", 1234, 1234.0, "1,234", "$1234.00", ["9", "1234"], "so it is\n#### 1,234"])
def test_gsm8k_scores_as_its_table_says_for_every_form_of_the_truth(response, strict, flexible, truth):
    assert gsm8k.compute_score(response, truth) == strict
    assert gsm8k.compute_score(response, truth, method="flexible") == flexible


def test_the_table_in_the_docstring_is_true():
    rows = re.findall(r"^``(.*?)``(?: and later ``(.*?)``)? +(\d) +(\d)$", gsm8k.__doc__, re.MULTILINE)
    assert len(rows) == 17
    for first, later, strict, flexible in rows:
        response = "\n".join(part for part in (first, later) if part)
        assert gsm8k.compute_score(response, "1234") == int(strict)
        assert gsm8k.compute_score(response, "1234", method="flexible") == int(flexible)


def test_a_unicode_minus_is_a_minus():
    assert gsm8k.compute_score("#### −5", "-5") == gsm8k.compute_score("#### -5", "−5") == 1


def test_format_score_is_for_a_wrong_answer_and_score_for_a_right_one():
    assert gsm8k.compute_score("#### 2", "3", format_score=0.1, score=2.0) == 0.1
    assert gsm8k.compute_score("#### 3", "3", format_score=0.1, score=2.0) == 2.0
    assert gsm8k.compute_score("3", "3", format_score=0.1, score=2.0) == 0.0


def test_an_answer_far_from_the_end_is_found():
    assert gsm8k.compute_score("#### 3" + " and so on" * 10_000, "3") == 1


def test_an_unknown_method_is_refused():
    with pytest.raises(RewardError, match="'strict' or 'flexible'"):
        gsm8k.extract_solution("", "loose")


@pytest.mark.parametrize("truth", [None, {"target": "72"}, True, "none", [], [None], float("nan")])
def test_a_truth_that_is_no_number_is_named(truth):
    with pytest.raises(RewardError, match="ground truth"):
        truth_numbers(truth)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12), max_value=10**12))
def test_any_way_to_write_a_number_gives_the_number(number):
    sign, size = ("-" if number < 0 else ""), abs(number)
    for text in (
        f"{number:f}",
        f"{number:,f}",
        f"{sign}${size:,f}",
        f"${number:f}",
        f"so {number:f}.",
        f"x={number:,f}!",
    ):
        assert last_number(text) == number == only_number(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("7-2", 2), ("7 -2", -2), ("1,2,3", 3), ("1,2345", 2345), ("x .5", Decimal("0.5")), ("a", None), ("(-3)", -3)],
)
def test_signs_commas_and_points_are_read_in_context(text, number):
    assert last_number(text) == number


@given(st.text(alphabet="0123456789,.-$#\\boxed{}/ \n−", max_size=60))
def test_no_text_breaks_a_score_function(text):
    assert gsm8k.compute_score(text, "5", method="flexible") in (0, 1)
    assert gsm8k.compute_score(text, "5") in (0, 1)
    assert arithmetic.compute_score(text, 5)["score"] in (0, 1)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["1" * 100_000, "1,111," * 50_000, "\\boxed{" * 20_000, "-" * 100_000, "#### " * 50_000]
)
def test_long_degenerate_texts_take_little_time(text):
    assert gsm8k.compute_score(text, "5") == 0
    assert gsm8k.compute_score(text, "5", method="flexible") == 0
    assert arithmetic.compute_score(text, "5")["score"] == 0


def test_braces_inside_a_box_are_matched():
    assert last_boxed(r"\boxed{a{b}c} d") == (0, "a{b}c")
    assert last_boxed(r"\boxed{1} \boxed{2") == (0, "1")
    assert last_boxed("none") is None


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("85", True),
        (" 85 \n", True),
        ("57+28=85", True),
        ("The answer is 85.", True),
        ("85..", False),
        ("185", False),
        ("8,85", False),
        ("0.85", False),
        ("-85", False),
        ("85 or 86", False),
        ("85 apples", False),
        ("", False),
    ],
)
def test_arithmetic_takes_the_integer_that_the_response_ends_with(response, right):
    result = arithmetic.compute_score(response, "85")
    assert (result["score"], result["acc"]) == (float(right), right)
    assert result["score"] == arithmetic.compute_score(response, 85)["score"]


@pytest.mark.parametrize(("response", "right"), [("3-8=-5", True), ("3-8=−5", True), ("-5", True), ("8-5", False)])
def test_arithmetic_knows_a_sign_from_an_operator(response, right):
    assert arithmetic.compute_score(response, "-5")["acc"] is right
