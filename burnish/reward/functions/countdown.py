"""Scores of the countdown game: make a target of given numbers by + - * /, each number used once.

What counts, for the target 24 and the numbers 4, 7, 8, 8:

===================================================== ======
response ends with                                    score
===================================================== ======
``<answer>(7 - 8 / 8) * 4</answer>``                  1
``<answer>(7 - 8 / 8) * 4 = 24</answer>``             1
``<answer>(7 − 8 ÷ 8) × 4</answer>``                  1
``\\boxed{(7 - 8/8) * 4}``                             1
``<answer>7 + 8 + 8</answer>``                        0.1
``<answer>3 * 8</answer>``                            0.1
``<answer>8 * 8 / 8 * 4 - 7 - 1</answer>``            0.1
``<answer>7 ** 2</answer>``                           0.1
``<answer>24</answer>``                               0.1
``(7 - 8 / 8) * 4``                                   0
===================================================== ======

The last ``<answer>`` (or box) counts. 0.1 is ``format_score``: an answer was given that is wrong. Values are exact
fractions. Expressions are read by a parser of four operators and brackets: nothing is evaluated as Python.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import Any

from burnish.reward.functions.answer import last_boxed, last_tag
from burnish.reward.functions.reference import unusable_truth, with_reference

_LONGEST = 500
_DEEPEST = 50
_TOKEN = re.compile(r"\s*([0-9]{1,18}|[-+*/()])")
_SIGNS = str.maketrans("−×·÷", "-**/")
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), (r"\(", ""), (r"\)", ""))


class _Unreadable(Exception):
    """The text is no expression of integers, + - * / and brackets, or divides by zero."""


def plain_text(answer: str) -> str:
    """An answer with ASCII operators: Unicode's and LaTeX's spellings of them, dollar signs and a last full stop taken out."""
    text = answer.translate(_SIGNS)
    for latex, plain in _LATEX:
        text = text.replace(latex, plain)
    return text.strip().strip("$").rstrip().removesuffix(".").strip("$")


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The value of an expression, and the numbers in it in their order.

    Raises:
        ValueError: it is no expression of integers, ``+ - * /`` and brackets, is longer than 500 characters or nested
            deeper than 50 brackets, or divides by zero.
    """
    try:
        return _Parser(expression).whole()
    except _Unreadable as error:
        raise ValueError(str(error)) from None


class _Parser:
    """Recursive descent: sum = product ((+|-) product)*; product = factor ((*|/) factor)*; factor = -factor | integer |
    (sum)."""

    def __init__(self, expression: str) -> None:
        if len(expression) > _LONGEST:
            raise _Unreadable(f"The expression is longer than {_LONGEST} characters.")
        self.tokens: list[str] = []
        position = 0
        text = expression.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None or (found.group(1).isdigit() and text[found.end() : found.end() + 1].isdigit()):
                raise _Unreadable(f"There is no expression at {text[position : position + 10]!r}.")
            self.tokens.append(found.group(1))
            position = found.end()
        self.position = 0
        self.depth = 0
        self.numbers: list[int] = []

    def whole(self) -> tuple[Fraction, list[int]]:
        value = self.sum()
        if self.position < len(self.tokens):
            raise _Unreadable(f"{self.tokens[self.position]!r} is one too many.")
        return value, self.numbers

    def next_is(self, *tokens: str) -> str | None:
        """Takes the next token where it is one of ``tokens``."""
        if self.position < len(self.tokens) and self.tokens[self.position] in tokens:
            self.position += 1
            return self.tokens[self.position - 1]
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while operator := self.next_is("+", "-"):
            other = self.product()
            value = value + other if operator == "+" else value - other
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while operator := self.next_is("*", "/"):
            other = self.factor()
            if operator == "/" and other == 0:
                raise _Unreadable("It divides by zero.")
            value = value * other if operator == "*" else value / other
        return value

    def factor(self) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Unreadable(f"It is nested deeper than {_DEEPEST}.")
        if self.next_is("-"):
            value = -self.factor()
        elif self.next_is("("):
            value = self.sum()
            if not self.next_is(")"):
                raise _Unreadable("A bracket is not closed.")
        elif self.position < len(self.tokens) and self.tokens[self.position].isdigit():
            value = Fraction(int(self.tokens[self.position]))
            self.numbers.append(int(self.tokens[self.position]))
            self.position += 1
        else:
            raise _Unreadable("A number is missing.")
        self.depth -= 1
        return value


def read_truth(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> tuple[Fraction, list[int]]:
    """Target and numbers: of ``{"target": 24, "numbers": [4, 7, 8, 8]}`` (or ``nums``), or of a target whose numbers are
    in ``extra_info``.

    Raises:
        RewardError: one of them is missing or no integer.
    """
    places = [place for place in (ground_truth, extra_info) if isinstance(place, dict)]
    target = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    numbers = next((place[key] for place in places for key in ("numbers", "nums") if key in place), ())
    try:
        wanted = Fraction(str(target))
        given = [int(str(number)) for number in numbers]
        if not given:
            raise ValueError("no numbers")
    except (ValueError, TypeError, ZeroDivisionError) as error:
        needed = "{'target': 24, 'numbers': [4, 7, 8, 8]}, of which the numbers may stand in extra_info,"
        raise unusable_truth(ground_truth, "is no game of countdown", needed) from error
    return wanted, given


def solve(numbers: list[int], target: Fraction, use_all: bool = True) -> str | None:
    """An expression of ``numbers`` that is ``target``, None if there is none. Six numbers take up to a few seconds."""
    found = _solve([(Fraction(number), str(number)) for number in numbers], target, use_all)
    return found[1:-1] if found and found.startswith("(") else found


def _solve(items: list[tuple[Fraction, str]], target: Fraction, use_all: bool) -> str | None:
    for value, text in items:
        if value == target and (len(items) == 1 or not use_all):
            return text
    for i, (a, left) in enumerate(items):
        for j, (b, right) in enumerate(items):
            if i == j:
                continue
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            made = [(a - b, f"({left} - {right})")]
            if i < j:
                made += [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
            if b != 0:
                made.append((a / b, f"({left} / {right})"))
            for item in made:
                if found := _solve([*rest, item], target, use_all):
                    return found
    return None


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str | None:
    """A solution in ``<answer>`` tags, searched for; None where there is none, or where there are more than five numbers
    (the search would take long)."""
    target, numbers = read_truth(ground_truth, extra_info)
    expression = solve(numbers, target) if len(numbers) <= 5 else None
    return f"<answer>{expression}</answer>" if expression else None


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    format_score: float = 0.1,
    use_all: bool = True,
) -> float:
    """1.0 for a right expression, ``format_score`` for another answer, 0.0 where none is given.

    Args:
        ground_truth: ``{"target": 24, "numbers": [4, 7, 8, 8]}``; the numbers may stand in ``extra_info`` instead.
        use_all: every number must be used; else numbers may be left out.

    Raises:
        RewardError: a ground truth that is no game of countdown.
    """
    target, numbers = read_truth(ground_truth, extra_info)
    places = (last_tag(solution_str), last_boxed(solution_str))
    found = max((place for place in places if place), key=lambda place: place[0], default=None)
    if found is None:
        return 0.0
    expression, _, claimed = plain_text(found[1]).partition("=")
    try:
        value, used = evaluate(expression)
        claim = evaluate(claimed)[0] if claimed.strip() else value
    except ValueError:
        return format_score
    missing, surplus = Counter(numbers) - Counter(used), Counter(used) - Counter(numbers)
    right = value == target == claim and not surplus and not (use_all and missing)
    return 1.0 if right else format_score
