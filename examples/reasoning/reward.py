"""Scores of the tasks in this folder: what counts is the last answer that a response gives.

============================================================== =====
response to "4 + 7 - 2 ="                                      score
============================================================== =====
``9``, ``The answer is 9.``, ``4 + 7 = 11, 11 - 2 = 9``         1
``<answer>9.0</answer>``, ``\\boxed{9}``                         1
``9, no, 10``, ``nine``, nothing at all                         0
``18 / 2``, ``18 - 9``: the value, or the last number, is 9     0
============================================================== =====

============================================================== =====
response to "make 10 of 2, 7, 5"                               score
============================================================== =====
``5 - 2 + 7``, ``(7 + 5) - 2 = 10``, ``<answer>7+5-2</answer>`` 1
``10 = 5 − 2 + 7``, ``**5 - 2 + 7**``, ``\\boxed{5 - 2 + 7}``    1
``7 + 5 + 2``: each number once, but it is not 10               0.1
``7 + 5 - 2 = 11``: it is 10, and something else is said        0.1
``5 + 5``, ``10``, words                                        0
============================================================== =====

Countdown's rule is that of reasoning-gym: every number exactly once, and the value is the target. Its own scorer hands the
response to sympy, which evaluates it as Python: what a policy writes is read by a parser of four operators here instead.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from burnish.reward.functions.answer import (
    is_any,
    last_answer,
    last_number,
    last_tag,
    number_text,
    to_ascii,
    truth_numbers,
)
from burnish.reward.functions.countdown import evaluate, plain_text

_SPACED_SIGN = re.compile(r"^\s*-\s+(?=[0-9])")
_UNDONE = re.compile(
    r"(?:[0-9)}]\s*(?:[-+*/÷·]|\\(?:div|times|cdot))[\s(+-]*|\\[dt]?frac\{-?[0-9]+\}\{-?)[0-9][0-9.,]*[^0-9]*$"
)
"""An operator before the last number: who repeats "96 / 2" has not said what it is, and "86 - 43" does not say 43."""
FORMAT_SCORE = 0.1
"""Of a countdown expression that uses each number once and misses the target: a tenth, so that it never pays to stop there."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The score of a response.

    Args:
        data_source: ``reasoning/<task>``.
        ground_truth: the right number; of countdown the target.
        extra_info: of countdown ``numbers``.

    Returns:
        ``score``; ``acc``, whether it is right; ``pred``, the answer that was read ("" for none).

    Raises:
        RewardError: the row has no usable ground truth.
        ValueError: a row of countdown without numbers.
    """
    if data_source.endswith("countdown"):
        return score_countdown(solution_str, truth_numbers(ground_truth)[0], (extra_info or {}).get("numbers"))
    return score_number(solution_str, truth_numbers(ground_truth))


def stated(response: str) -> str:
    """What the last ``<answer>``, box or "answer is" says, else the whole response."""
    tagged = last_tag(response)
    if tagged is not None:
        return tagged[1]
    said = last_answer(response)
    return response if said is None else said


def score_number(response: str, truths: Sequence[Fraction]) -> dict[str, Any]:
    """1 where the last number of the answer is right, and is no part of something that is left to work out."""
    answer = stated(response)
    sides = [side for side in to_ascii(answer).split("=") if side.strip()]
    last = _SPACED_SIGN.sub("-", sides[-1]) if sides else ""
    number = None if _UNDONE.search(last) else last_number(last)
    right = is_any(number, truths)
    return {"score": float(right), "acc": right, "pred": "" if number is None else number_text(number)}


def score_countdown(response: str, target: Fraction, numbers: Sequence[Any] | None) -> dict[str, Any]:
    """1 where the answer is an expression of every number once with the target as its value."""
    if not numbers:
        raise ValueError("a row of countdown needs its numbers in extra_info['numbers']: a list of integers.")
    lines = [line for line in stated(response).splitlines() if line.strip()]
    text = plain_text(lines[-1]).strip("*`") if lines else ""
    sides = [side.strip(" *`") for side in text.split("=") if side.strip(" *`")]
    expression = next((side for side in sides if _uses(side, numbers)), None)
    if expression is None:
        return {"score": 0.0, "acc": False, "pred": sides[0][:100] if sides else ""}
    # An equation is right as a whole: "7 + 5 - 2 = 11" says that the answer is another one.
    right = all(_value(side) == target for side in sides)
    return {"score": 1.0 if right else FORMAT_SCORE, "acc": right, "pred": expression}


def _uses(side: str, numbers: Sequence[Any]) -> bool:
    """Whether it is an expression of every number once."""
    try:
        return sorted(evaluate(side)[1]) == sorted(int(number) for number in numbers)
    except ValueError:
        return False


def _value(side: str) -> Fraction | None:
    try:
        return evaluate(side)[0]
    except ValueError:
        return None
