"""The built-in score functions: right, wrong and tricky answers, written by hand."""

import inspect
import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.reward.compute_score import SCORE_FUNCTIONS, default_compute_score, reference_solution, score_function
from burnish.reward.functions import (
    choice,
    countdown,
    dapo_math,
    formats,
    gsm8k,
    hendrycks_math,
    latex,
    length,
    search_qa,
)
from burnish.reward.functions import reasoning_gym as gym
from burnish.utils.errors import RewardError
from tests.conftest import REPO

GAME = {"target": 24, "numbers": [4, 7, 8, 8]}


def score_of(result):
    return result["score"] if isinstance(result, dict) else result


def table_of(module):
    """The rows of the table in a module's docstring: the response, and its numbers."""
    rows = re.findall(r"^``(.*?)``(?: and later ``(.*?)``)? +([-\d. ]+)$", module.__doc__, re.MULTILINE)
    return [
        ("\n".join(part for part in (first, later) if part), [float(x) for x in numbers.split()])
        for first, later, numbers in rows
    ]


# --- the tables on the modules' pages


@pytest.mark.parametrize(
    ("module", "truth", "num_rows"),
    [(gsm8k, "1234", 17), (hendrycks_math, r"\frac{1}{2}", 12), (dapo_math, "34", 13), (choice, "C", 14)],
)
def test_the_tables_of_strict_and_flexible_are_true(module, truth, num_rows):
    rows = table_of(module)
    assert len(rows) == num_rows
    for response, (strict, flexible) in rows:
        assert score_of(module.compute_score(response, truth, method="strict")) == strict, response
        assert score_of(module.compute_score(response, truth, method="flexible")) == flexible, response
        assert score_of(module.compute_score(f"Let us see.\n{response}", truth, method="strict")) == strict, response
    with pytest.raises(RewardError, match="'strict' or 'flexible'"):
        module.compute_score("", truth, method="loose")


def test_the_table_in_the_docs_is_true():
    modules = {"gsm8k": gsm8k, "hendrycks_math": hendrycks_math, "dapo_math": dapo_math, "choice": choice}
    page = (REPO / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*?\*?(\w+)[^|]* \| (\S+) \| `(.*?)` \| (-?[01]) \| (-?[01]) \|$", page, re.MULTILINE)
    assert len(rows) == 32
    for name, truth, response, strict, flexible in rows:
        compute_score = modules[name].compute_score
        assert score_of(compute_score(response, truth, method="strict")) == int(strict), response
        assert score_of(compute_score(response, truth, method="flexible")) == int(flexible), response
    for name, default in re.findall(r"^\| \*\*(\w+)\*\* \((\w+)\)", page, re.MULTILINE):
        assert inspect.signature(modules[name].compute_score).parameters["method"].default == default


def test_the_table_of_countdown_is_true():
    rows = table_of(countdown)
    assert len(rows) == 10
    for response, (score,) in rows:
        assert countdown.compute_score(response, GAME) == score, response


def test_the_table_of_search_qa_is_true():
    rows = table_of(search_qa)
    assert len(rows) == 6
    for answer, expected in rows:
        response = f"I looked. <answer>{answer}</answer>"
        scores = [
            search_qa.compute_score(response, ["Barack Obama", "Obama"], metric=m)["score"]
            for m in ("em", "f1", "sub_em")
        ]
        assert scores == pytest.approx(expected), answer


# --- mathematics


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\dfrac{3}{4}", r"\frac34"),
        (r"\frac3{4}", "3/4"),
        ("0.75", r"\frac{3}{4}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("1,234", "1234"),
        (r"1{,}234.0", "1234"),
        (r"\$18", "18"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"5\text{ cm}^2", "5"),
        ("5 apples", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(A)}", "(A)"),
        ("x = 7", "7"),
        ("−5", "-5"),
        ("-1/2", r"-\frac{1}{2}"),
        (".5", "0.5"),
        ("$7$", "7"),
        (r"\(7\)", "7"),
        ("7.", "7"),
        ("007", "7"),
        ("0", "0.0"),
        ("1e3", "1000"),
    ],
)
def test_answers_of_one_value_or_form_are_the_same(answer, truth):
    assert latex.same_answer(answer, truth)
    assert latex.same_answer(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("", ""),
        ("2x", "2"),
        ("2xy", "2"),
        ("x^2", "2"),
        ("12", "1"),
        ("1,2", "12"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        (r"\frac{1}{2}", "12"),
        ("-5", "5"),
        ("5 or 6", "5"),
        ("0.333", "1/3"),
        ("a", "A"),
        (r"\sqrt{2}", "2"),
        ("50.5", "50"),
        ("x=5,y=6", "5"),
    ],
)
def test_answers_that_differ_are_not_the_same(answer, truth):
    assert not latex.same_answer(answer, truth)
    assert not latex.same_answer(truth, answer)


def test_computer_algebra_sees_what_the_form_does_not_and_can_be_left_out():
    pytest.importorskip("math_verify")
    response, truth = r"\boxed{2\sqrt{3}+1}", r"1+2\sqrt{3}"
    assert hendrycks_math.compute_score(response, truth) == 1
    assert hendrycks_math.compute_score(response, truth, algebra=False) == 0
    assert hendrycks_math.compute_score(r"\boxed{2\sqrt{3}-1}", truth) == 0
    assert hendrycks_math.compute_score(rf"\boxed{{{'1+' * 200}1}}", "201") == 0
    assert dapo_math.compute_score(f"Answer: {response}", truth, algebra=True)["acc"]


def test_without_math_verify_the_form_decides(monkeypatch):
    monkeypatch.setattr(hendrycks_math, "has_algebra", lambda: False)
    assert hendrycks_math.compute_score(r"\boxed{2\sqrt{3}+1}", r"1+2\sqrt{3}") == 0
    assert hendrycks_math.compute_score(r"\boxed{1/2}", "0.5") == 1


def test_the_truth_of_math_may_be_a_solution_a_number_or_a_list():
    for truth in (r"so $x = \boxed{7}$.", 7, 7.0, ["8", 7]):
        assert hendrycks_math.compute_score(r"\boxed{7}", truth, algebra=False) == 1
    for truth in (None, "", " ", [], {"answer": 7}, True):
        with pytest.raises(RewardError, match="a text that is not empty, a number, or a list of those is needed"):
            hendrycks_math.compute_score(r"\boxed{7}", truth)


def test_dapo_gives_minus_one_and_what_it_found():
    assert dapo_math.compute_score("Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert dapo_math.compute_score("I give up", "34") == {"score": -1.0, "acc": False, "pred": ""}
    assert dapo_math.compute_score("Answer: 34\n" + "and so on. " * 1000, ["33", "34"])["acc"]


# --- multiple choice


@pytest.mark.parametrize("truth", ["C", "(C)", "c", ["A", "C"], " C. "])
def test_a_letter_is_a_truth_in_any_form(truth):
    assert choice.compute_score("Answer: C", truth)["score"] == 1
    assert choice.compute_score("Answer: B", truth) == {"score": 0.0, "acc": False, "pred": "B"}


@pytest.mark.parametrize("truth", ["", "CD", 3, None, [], {"answer": "C"}])
def test_what_is_no_letter_is_no_truth_of_a_choice(truth):
    with pytest.raises(RewardError, match="no letter of a choice|has no ground truth"):
        choice.compute_score("Answer: C", truth)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: C) Paris", "C"),
        ("Answer: C: Paris", "C"),
        (r"\boxed{\textbf{(B)}\ 5}", "B"),
        ("Answer: A and B", ""),
        ("Answer: A, B", ""),
        ("Answer: I don't know", ""),
        ("Answer: I", "I"),
        ("The answer is option C", "C"),
        ("The answer is choice (C).", "C"),
        ('Answer: "C"', "C"),
        ("Answer: [C]", "C"),
        ("Answer:\nC", "C"),
        ("Answer: C; D", ""),
        ("Answer: option Certainly", ""),
        ("The answer is a dog", ""),
        ("The answer is A dog", "A"),
        ("The answer is can't", ""),
        ("Answer:", ""),
        ("B\nC", "C"),
        ("A B", ""),
        ("", ""),
    ],
)
def test_the_letter_of_a_response_stands_alone(response, letter):
    assert choice.extract_choice(response) == letter


# --- countdown


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("8-3-2", 3, [8, 3, 2]),
        ("8/4/2", 1, [8, 4, 2]),
        ("1/3", Fraction(1, 3), [1, 3]),
        ("-(2-5)", 3, [2, 5]),
        ("2--3", 5, [2, 3]),
        (" ( 7 ) ", 7, [7]),
    ],
)
def test_arithmetic_is_evaluated_exactly(expression, value, numbers):
    assert countdown.evaluate(expression) == (value, numbers)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "+1",
        "(1",
        "1)",
        "1 2",
        "2(3)",
        "1/0",
        "1/(2-2)",
        "2**3",
        "2//3",
        "1.5",
        "a",
        "__import__('os')",
        "1;2",
        "1=1",
        "(" * 60 + "1" + ")" * 60,
        "-" * 60 + "1",
        "1+" * 300 + "1",
        "9" * 30,
        "1_0",
        "１",
    ],
)
def test_what_is_no_arithmetic_is_not_evaluated(expression):
    with pytest.raises(ValueError):
        countdown.evaluate(expression)


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        max_leaves=8,
    )
)
def test_arithmetic_agrees_with_python(expression):
    with_fractions = re.sub(r"\d+", lambda found: f"Fraction({found.group()})", expression)
    try:
        expected = eval(with_fractions, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            countdown.evaluate(expression)
    else:
        assert countdown.evaluate(expression)[0] == expected


def test_countdown_counts_numbers_claims_and_what_may_be_left_out():
    def score(expression, **kwargs):
        return countdown.compute_score(f"<answer>{expression}</answer>", GAME, format_score=0.0, **kwargs)

    assert score("8 * (7 - 4)") == 0
    assert score("8 * (7 - 4)", use_all=False) == 1
    assert score("8 * 3", use_all=False) == 0
    assert score("8 * 8 * 8 / 8 - 8 * 5", use_all=False) == 0
    assert score("(7 - 8 / 8) * 4 = 25") == 0
    assert countdown.compute_score("<answer>2 * 12</answer>", 24, {"nums": [2, "12"]}) == 1
    for truth in (
        24,
        {"target": 24},
        {"numbers": [1]},
        {"target": "x", "numbers": [1]},
        {"target": 1, "numbers": [1.5]},
        None,
    ):
        with pytest.raises(RewardError, match="no game of countdown|has no ground truth"):
            countdown.compute_score("", truth)


# --- search


def test_search_qa_reads_truths_in_its_forms_and_only_answers_in_tags():
    for truth in ("42", 42, ["41", "42"], {"target": ["42"]}, {"target": "42"}):
        assert search_qa.compute_score("<answer>42</answer>", truth)["score"] == 1
        assert search_qa.compute_score("42", truth) == {"score": 0.0, "em": 0.0, "f1": 0.0, "pred": ""}
    assert search_qa.compute_score("<answer>x</answer>", "y", format_score=0.2)["score"] == 0.2
    assert search_qa.compute_score("<answer>the</answer>", ["the", "b"])["score"] == 0
    assert search_qa.compute_score("<answer>carpet</answer>", "car", metric="sub_em")["score"] == 0
    for truth in (None, [], [None], {"answer": "x"}, "", "the", True):
        with pytest.raises(RewardError, match="holds no answer|has no ground truth"):
            search_qa.compute_score("", truth)
    with pytest.raises(RewardError, match="'em', 'f1' or 'sub_em'"):
        search_qa.compute_score("", "x", metric="rouge")


def test_f1_counts_a_word_as_often_as_both_have_it():
    assert search_qa.f1("x x x", "x") == pytest.approx(0.5)
    assert search_qa.f1("x y", "y z") == pytest.approx(0.5)
    assert search_qa.f1("", "x") == 0


# --- form and length

FORM = [
    ("<think>a</think><answer>b</answer>", 1, 1, 1),
    ("  <think>a</think>\n<answer>b</answer>\n", 1, 1, 1),
    ("<think>a</think> b", 0, 1, 0.5),
    ("<think>a</think><answer>b</answer> and more", 0, 1, 1),
    ("before <think>a</think><answer>b</answer>", 0, 0, 1),
    ("<answer>b</answer><think>a</think>", 0, 0, 1),
    ("<think></think><answer>b</answer>", 0, 0, 1),
    ("<think>a</think><answer> </answer>", 0, 1, 1),
    ("<think>a</think><think>c</think><answer>b</answer>", 0, 0, 0.5),
    ("<think>a<answer>b</answer>", 0, 0, 0.75),
    ("<think>a </answer></think><answer>b</answer>", 0, 1, 0.75),
    ("", 0, 0, 0),
]


@pytest.mark.parametrize(("response", "think_answer", "think", "tags"), FORM)
def test_the_form_of_a_response_is_scored(response, think_answer, think, tags):
    assert formats.think_answer(response) == think_answer
    assert formats.think(response) == think
    assert formats.tags(response) == tags
    if response.startswith("<think>"):
        assert formats.think_answer(response.removeprefix("<think>"), opened=True) == think_answer
        assert formats.think(response.removeprefix("<think>"), opened=True) == think


def test_a_pattern_is_searched_or_matches_the_whole():
    assert formats.matches("say yes!", pattern="yes") == 1
    assert formats.matches("say yes!", pattern="yes", whole=True) == 0
    assert formats.matches("yes", pattern="yes", whole=True) == 1
    assert formats.tags("<a>x</a>", names=["a", "b"]) == 0.5
    with pytest.raises(RewardError, match="no regular expression"):
        formats.matches("", pattern="(")
    with pytest.raises(RewardError, match="names of tags"):
        formats.tags("", names=[])


@pytest.mark.parametrize(("num_words", "penalty"), [(0, 0), (10, 0), (15, -0.5), (20, -1), (100, -1)])
def test_length_over_the_limit_is_punished_in_a_line(num_words, penalty):
    assert length.over_limit("w " * num_words, start=10, limit=20) == penalty


def test_lengths_follow_their_formulas():
    assert length.near_target("a b c", target=5, slope=0.1) == pytest.approx(-0.2)
    assert length.near_target("abc", extra_info={"target_length": 1}, slope=0.5, unit="characters") == -1
    assert [length.cosine("w " * n, limit=4, at_zero=2.0, at_limit=-1.0) for n in (0, 2, 4, 9)] == pytest.approx(
        [2, 0.5, -1, -1]
    )
    for call, what in (
        (lambda: length.near_target("a"), "target length"),
        (lambda: length.over_limit("a", start=2, limit=2), "start < limit"),
        (lambda: length.cosine("a", limit=0), "positive limit"),
        (lambda: length.cosine("a", limit=1, unit="lines"), "'words' or 'characters'"),
    ):
        with pytest.raises(RewardError, match=what):
            call()


# --- dispatch

TRUTHS = {
    "gsm8k": "1/3",
    "arithmetic": -5,
    "hendrycks_math": r"\frac{\sqrt{3}}{2}",
    "dapo_math": 34,
    "choice": "(B)",
    "countdown": GAME,
    "search_qa": {"target": ["the", "Barack Obama"]},
    "reasoning_gym": "-4",
    "code": {"assert_case": ["assert f(1) == 2"]},
}
ENTRY = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}
NAMES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "hendrycks_math",
    "DigitalLearningGmbH/MATH-lighteval": "hendrycks_math",
    "HuggingFaceH4/MATH-500": "hendrycks_math",
    "numina_olympiads": "hendrycks_math",
    "math_dapo": "dapo_math",
    "math_dapo_reasoning": "dapo_math",
    "math": "dapo_math",
    "aime2024": "dapo_math",
    "searchR1_nq": "search_qa",
    "countdown": "countdown",
    "reasoning_gym/chain_sum": "reasoning_gym",
}


@pytest.mark.parametrize(("data_source", "module"), NAMES.items())
def test_a_data_source_goes_to_its_function_and_the_reference_scores_in_full(data_source, module):
    if module == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    assert score_function(data_source).__module__ == f"burnish.reward.functions.{module}"
    truth, extra_info = TRUTHS[module], {"entry": json.dumps(ENTRY)}
    reference = reference_solution(data_source, truth, extra_info)
    assert score_of(default_compute_score(data_source, reference, truth, extra_info)) == 1
    assert score_of(default_compute_score(data_source, "", truth, extra_info)) <= 0.01


def test_every_function_can_also_be_named_as_a_custom_one():
    for module in sorted(set(SCORE_FUNCTIONS.values()) - {"reasoning_gym"}):
        name = next(key for key in SCORE_FUNCTIONS if SCORE_FUNCTIONS[key] == module).removesuffix("*")
        result = score_function(name)(data_source="x", solution_str="", ground_truth=TRUTHS[module], extra_info={})
        assert score_of(result) <= 0


def test_pictures_are_refused_by_name_and_near_names_are_unknown():
    with pytest.raises(RewardError, match=r"hiyouga/geometry3k.*pictures.*custom_reward_function"):
        score_function("hiyouga/geometry3k")
    for name in ("gsm8k", "openai/gsm8k-2", "xaime", "reasoning_gym", "MATH", ""):
        with pytest.raises(RewardError, match="no built-in reward function"):
            score_function(name)


@given(st.text(alphabet="0123456789ABC<>/answer:\\boxed{}()+-*=. \n", max_size=80))
def test_no_text_breaks_a_function(text):
    response = f"<answer>{text}</answer>"
    for module in (gsm8k, dapo_math, choice, countdown, search_qa):
        truth = TRUTHS[module.__name__.rpartition(".")[2]]
        for whole in (text, response):
            assert -1 <= score_of(module.compute_score(whole, truth)) <= 1
    assert 0 <= hendrycks_math.compute_score(rf"\boxed{{{text}}}", r"\sqrt{3}", algebra=False) <= 1
    formats.think_answer(text), formats.think(text), formats.tags(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["(", "1+", "<answer>", "</answer>", "\\boxed{", "\\text{", "\\frac1", "$", "a ", "Answer: ", "{", "C or "]
)
def test_long_texts_take_linear_time(piece):
    text = piece * (100_000 // len(piece))
    for whole in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"Answer: {text}"):
        for name in ("openai/gsm8k", "math", "multiple_choice", "countdown", "searchR1_nq", "lighteval/MATH"):
            default_compute_score(
                name, whole, TRUTHS[SCORE_FUNCTIONS.get(name) or score_function(name).__module__.rpartition(".")[2]]
            )


# --- reasoning-gym


def test_entries_survive_json_with_their_tuples_and_keys():
    entry = {"metadata": {"a": (1, (2, [3])), "b": {1: "x", (2, 3): None}, "c": {}}, "answer": "é"}
    text = gym.encode_entry(entry)
    assert gym.decode_entry(text) == entry
    assert json.loads(text)["answer"] == "é"


def test_a_row_without_an_entry_is_named():
    for extra_info in (None, {}, {"entry": "no json"}, {"entry": "{}"}, {"entry": 3}):
        with pytest.raises(RewardError, match="needs its entry"):
            gym.compute_score("", "", extra_info)


def test_reasoning_gym_takes_the_answer_from_where_responses_put_it():
    for response in ("<think>5</think><answer> -4 </answer>", "Answer: -4", r"so \boxed{-4}", " -4\n"):
        assert gym.extract_answer(response) == "-4"


def test_reasoning_gym_scores_by_the_tasks_own_verifier():
    pytest.importorskip("reasoning_gym")
    result = gym.compute_score("<answer>-4</answer>", "-4", {"entry": ENTRY})
    assert result == {"score": 1.0, "acc": True, "pred": "-4"}
    assert gym.compute_score("<answer>4</answer>", "-4", {"entry": ENTRY})["acc"] is False
    partly = gym.compute_score("<answer>-4 or so</answer>", "-4", {"entry": ENTRY})
    assert 0 < partly["score"] < 1
    assert partly["acc"] is False
    with pytest.raises(RewardError, match="no task 'nothing'"):
        gym.load_scorer("nothing")


@pytest.mark.slow
def test_every_task_of_reasoning_gym_scores_its_own_answers_after_json():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    tried = 0
    for task in sorted(set(DATASETS) - {"composite"}):
        for entry in reasoning_gym.create_dataset(task, size=2, seed=5):
            if entry["answer"] is not None:
                extra_info = {"entry": gym.encode_entry(entry)}
                reference = gym.reference_solution("", extra_info)
                assert gym.compute_score(reference, "", extra_info)["score"] == 1, (task, entry["answer"])
                tried += 1
    assert tried > 150


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("3 1/2", "7/2", True),
        ("3 1/2", "31/2", False),
        ("-3 1/2", "-3.5", True),
        ("1 2", "12", False),
        ("1 234", "1234", True),
        ("x^{2}", "x^2", True),
        (r"a_{n}", "a_n", True),
        ("x^{12}", "x^12", False),
        (r"\frac x2", r"\dfrac{x}{2}", True),
        (r"\text{(A)}", "A", True),
        ("(A)", r"\textbf{A}", True),
        ("7 million", "7", False),
        ("5 squared", "5", False),
        ("5 minutes", "5", True),
    ],
)
def test_what_spaces_braces_and_words_change_in_an_answer(answer, truth, same):
    assert latex.same_answer(answer, truth) is same
    assert latex.same_answer(truth, answer) is same


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (r"\boxed{25}", 1.0),
        (r"$\boxed{25}$ dollars", 1.0),
        ("25 and 26", 0.0),
        ("25; 26", 0.0),
        ("25–26", 0.0),
        ("25 apples and 3 pears", 0.0),
        ("25 – as shown", 1.0),
    ],
)
def test_gsm8k_takes_a_box_behind_the_mark_and_no_choice_of_numbers(answer, score):
    assert gsm8k.compute_score(f"#### {answer}", "25") == score


@pytest.mark.parametrize("answer", ["\n34", "\n\n$$34$$", "\n$$\n34\n$$", "\n\\[\n34\n\\]", "**\n\n$\\boxed{34}$"])
def test_an_answer_may_stand_on_the_line_below_its_mark(answer):
    assert dapo_math.compute_score(f"**Answer:{answer}", "34")["acc"]


def test_a_full_stop_ends_an_expression_of_countdown():
    assert countdown.compute_score("<answer>(7 - 8/8) * 4 = 24.</answer>", GAME) == 1.0
