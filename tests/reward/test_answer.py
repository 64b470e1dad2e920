"""The extractor: numbers and answers in texts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.reward.functions.answer import (
    last_answer,
    last_boxed,
    last_number,
    last_stated,
    last_tag,
    leading_number,
    number_text,
    only_number,
    truth_numbers,
    whole_number,
)
from burnish.utils.errors import RewardError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it costs $1,234.", 1234),
        ("€1.50", Fraction(3, 2)),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        (r"1{,}234{,}567", 1234567),
        (r"1\,234", 1234),
        ("１２３", 123),
        ("so 1/2", Fraction(1, 2)),
        ("so 1 1/2", Fraction(3, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"-\tfrac{1}{3}", Fraction(-1, 3)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        (r"3.5 \times 10^{2}", 350),
        ("3 × 10^2", 300),
        ("50%", 50),
        ("12 apples and 13 pears", 13),
        ("1/0", None),
        ("1e999999", None),
        ("1" * 1001, None),
        ("on 3/4/2020", 2020),
        ("no number", None),
        ("5e", 5),
        ("v1e", 1),
    ],
)
def test_the_last_number_is_read_in_every_spelling(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1234 apples", 1234),
        (" **1,234**", 1234),
        ("`12`", 12),
        (r"\(12\)", 12),
        ("$12$", 12),
        ("12. The answer is 12.", 12),
        ("12, so", 12),
        ("12 = 3*4", 12),
        ("12 tomatoes", 12),
        ("12 oranges", 12),
        ("12 (each)", 12),
        ("1 234", 1234),
        ("1 234 567 people", 1234567),
        ("1 23", None),
        ("12 or 13", None),
        ("12 apples or 13 apples", None),
        ("12 to 13", None),
        ("12,13", None),
        ("12:30", None),
        ("5 + 3", None),
        ("5-3", None),
        ("2 x 3", None),
        ("2^3", None),
        (r"2\sqrt{3}", None),
        ("2(3)", None),
        ("1.2.3", None),
        ("about 12", None),
        ("", None),
    ],
)
def test_a_leading_number_is_no_piece_of_something_longer(text, number):
    assert leading_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("5.", 5),
        ("5 km", 5),
        ("5 square feet", 5),
        ("5 cm^2", 5),
        ("5%", 5),
        ("1 000", 1000),
        ("2x", None),
        ("2xy", None),
        ("x^2", None),
        ("3 pm", None),
        ("5 and 6", None),
        ("5 or", None),
        ("about 5", None),
        ("(5)", None),
    ],
)
def test_a_whole_number_has_a_unit_at_most(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"), [("x=5", 5), ("1,2", None), ("x^2", None), (r"\sqrt{2}", None), (r"90^\circ", 90)]
)
def test_an_only_number_is_neither_power_nor_root(text, number):
    assert only_number(text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\fbox{1}", "1"),
        (r"\boxed {1}", "1"),
        (r"$\boxed 4$ is it", "4"),
        (r"\boxed4.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.} and", r"\left\{ x \right."),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{}", ""),
        (r"\boxedness{1}", None),
        ("boxed{1}", None),
    ],
)
def test_the_last_complete_box_is_found(text, content):
    found = last_boxed(text)
    assert (found and found[1]) == content


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 5", "5"),
        ("answer : 5\nmore", "5"),
        ("**Answer:** 5", "5"),
        ("**Final Answer**: **5**", "5"),
        ("The answer is $5$. I hope it is correct.", "$5$"),
        ("The answer is 3.5 m. Hence", "3.5 m"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("the answers: 5", None),
        ("answer 5", None),
    ],
)
def test_the_last_statement_is_found(text, said):
    found = last_stated(text)
    assert (found and found[1]) == said


def test_of_box_and_statement_the_later_is_the_answer():
    assert last_answer(r"Answer: 1. No, \boxed{2}") == "2"
    assert last_answer("\\boxed{2}\nAnswer: 1") == "1"
    assert last_answer(r"Answer: $\boxed{2}$ apples") == "2"
    assert last_answer(r"\boxed{34}. My answer is final.") == "34"
    assert last_answer(r"\boxed{34}. The answer is x.") == "x"
    assert last_answer("The answer is even.") == "even"
    assert last_answer("2") is None


def test_the_last_complete_tag_is_found():
    assert last_tag("<answer>1</answer> <answer>2</answer> <answer>3") == (19, "2")
    assert last_tag("</answer> <answer>") is None
    assert last_tag("<answer>1") is None
    assert last_tag("<a>x</a>", "a") == (0, "x")


@pytest.mark.parametrize(
    ("truth", "number"),
    [
        ("1/2", Fraction(1, 2)),
        ("18 apples", 18),
        ("1 234", 1234),
        ("it is 5", 5),
        ("7 * 6 = 42\n#### 42", 42),
        (0.1, Fraction(1, 10)),
    ],
)
def test_a_truth_is_read_whole(truth, number):
    assert truth_numbers(truth) == [number]


@pytest.mark.parametrize("truth", ["18 apples in 3 boxes", "7-2", "1,2", "12 or 13"])
def test_a_truth_of_several_numbers_is_refused_rather_than_misread(truth):
    with pytest.raises(RewardError, match=r"holds 2 numbers; one, or a list"):
        truth_numbers(truth)


@given(st.fractions(max_denominator=1000))
def test_a_number_reads_as_it_is_written(number):
    assert truth_numbers(number_text(number)) == [number]
    assert last_number(f"so {number_text(number)}.") == number
    assert leading_number(f"{number_text(number)} apples") == number
    assert whole_number(number_text(number)) == number


_PIECES = st.sampled_from(
    [
        *"0123456789,.-+*/$%(){}#\\ \n−x^_",
        "\\boxed{",
        "\\fbox",
        "\\frac",
        "{1}",
        "answer is",
        "Answer:",
        "<answer>",
        "</answer>",
        "or",
        "1e5",
        " 10^{",
        "\\times",
        "and",
        "\\text{",
    ]
)


@given(st.lists(_PIECES, max_size=30).map("".join) | st.text(max_size=60))
def test_no_text_breaks_the_extractor(text):
    for extract in (last_number, leading_number, only_number, whole_number):
        assert extract(text) is None or isinstance(extract(text), Fraction)
    boxed = last_boxed(text)
    assert boxed is None or text[boxed[0] :].startswith(("\\boxed", "\\fbox"))
    assert last_answer(text) is None or isinstance(last_answer(text), str)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1 ",
        "1,111,",
        "1/",
        "1/1/",
        "1e",
        "\\frac{",
        "\\frac{1}{",
        "\\boxed",
        "\\boxed{",
        "\\boxed ",
        "answer ",
        "answer is ",
        "{",
        "}",
        "\\",
        "1 111 ",
        "<answer>",
        "* ",
        "1\\times ",
        "1*10^{",
        "answer:\n",
        ".",
        "-",
        "$",
        "#### 1",
        "1 a ",
    ],
)
def test_the_extractor_takes_linear_time(piece):
    text = piece * (100_000 // len(piece))
    for extract in (last_number, leading_number, only_number, whole_number, last_boxed, last_stated, last_tag):
        extract(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("blank", [" ", "\t"])
def test_blanks_behind_a_statement_take_linear_time(blank):
    said = f"34{blank * 200_000}apples"
    assert last_stated(f"Answer: {said}") == (0, said)
