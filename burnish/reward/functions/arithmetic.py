"""Scores of integer arithmetic: the response must end with the integer that is right."""

import re
from typing import Any

from burnish.reward.functions.answer import is_any, last_number, number_text, to_ascii, truth_numbers
from burnish.reward.functions.reference import with_reference

_FINAL_INTEGER = re.compile(r"(?<![0-9.,])(?:(?<![0-9A-Za-z)\]])-)?[0-9]+\Z")


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The integer alone."""
    return number_text(truth_numbers(ground_truth)[0])


@with_reference(reference_solution)
def compute_score(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, *, data_source: str = ""
) -> dict[str, Any]:
    """``score`` 1.0 if the response ends with the right integer (white space and one full stop may follow), else 0.0.

    Returns:
        ``score``; ``acc``, the same as a bool; ``pred``, the integer it ends with as text, "" if it ends otherwise.

    Raises:
        RewardError: the ground truth is no number.
    """
    truths = truth_numbers(ground_truth)
    found = _FINAL_INTEGER.search(to_ascii(solution_str).rstrip().removesuffix("."))
    pred = found.group() if found else ""
    right = is_any(last_number(pred), truths)
    return {"score": float(right), "acc": right, "pred": pred}
