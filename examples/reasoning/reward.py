"""Scores of the tasks in this folder: what counts is the last answer that a response gives.

============================================================== =====
response to "4 + 7 - 2 ="                                      score
============================================================== =====
``9``, ``The answer is 9.``, ``4 + 7 = 11, 11 - 2 = 9``         1
``<answer>9.0</answer>``, ``\\boxed{9}``                         1
``9, no, 10``, ``nine``, nothing at all                         0
============================================================== =====

============================================================== =====
response to "make 10 of 2, 7, 5"                               score
============================================================== =====
``5 - 2 + 7``, ``(7 + 5) - 2 = 10``, ``<answer>7+5-2</answer>`` 1
``7 + 5 + 2``: each number once, but it is not 10               0.1
``5 + 5``, ``10``, words                                        0
============================================================== =====

Countdown's rule is that of reasoning-gym: every number exactly once, and the value is the target. Its own scorer hands the
response to sympy, which evaluates it as Python: what a policy writes is read by a parser of four operators here instead.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from burnish.reward.functions.answer import is_any, last_answer, last_number, last_tag, number_text, truth_numbers
from burnish.reward.functions.countdown import evaluate

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
    """1 where the last number of the answer is right."""
    number = last_number(stated(response))
    right = is_any(number, truths)
    return {"score": float(right), "acc": right, "pred": "" if number is None else number_text(number)}


def score_countdown(response: str, target: Fraction, numbers: Sequence[Any] | None) -> dict[str, Any]:
    """1 where the answer is an expression of every number once with the target as its value."""
    if not numbers:
        raise ValueError("a row of countdown needs its numbers in extra_info['numbers']: a list of integers.")
    lines = [line for line in stated(response).strip().splitlines() if line.strip()]
    expression = lines[-1].partition("=")[0].strip().rstrip(".") if lines else ""
    try:
        value, used = evaluate(expression)
    except ValueError:
        return {"score": 0.0, "acc": False, "pred": expression[:100]}
    if sorted(used) != sorted(int(number) for number in numbers):
        return {"score": 0.0, "acc": False, "pred": expression}
    right = value == target
    return {"score": 1.0 if right else FORMAT_SCORE, "acc": right, "pred": expression}
