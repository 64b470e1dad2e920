r"""Scores of answers to GSM8K and its like, where the answer is one number.

What counts as the answer, for the truth 1234:

================================ ====== ========
response ends with               strict flexible
================================ ====== ========
``#### 1234``                    1      1
``#### 1,234``                   1      1
``#### 1 234``                   1      1
``#### $1234``                   1      1
``#### **1234**``                1      1
``#### 1234.``                   1      1
``#### 1234.00``                 1      1
``#### 1234 apples``             1      1
``#### 1.234e3``                 1      1
``#### 2468/2``                  1      1
``#### 1`` and later ``#### 1234`` 1    1
``#### 1234`` and later ``#### 1`` 0    0
``#### 1234 or 1235``            0      0
``#### 1234/5``                  0      0
``The answer is \boxed{1234}``   0      1
``The answer is 1234.``          0      1
``#### about 1234``              0      1
================================ ====== ========

A Unicode minus counts as a minus. The whole text is searched. flexible takes the last ``#### number`` or ``\boxed{}``,
whichever comes later, and where the text has neither, its last number. The method is chosen by
``reward.custom_reward_function.path=pkg://burnish.reward.functions.gsm8k`` with ``reward_kwargs.method=flexible``.
"""

import re
from fractions import Fraction
from typing import Any, Literal

from burnish.reward.functions.answer import (
    begins_with_number,
    is_any,
    last_boxed,
    last_number,
    leading_number,
    number_text,
    only_number,
    to_ascii,
    truth_numbers,
)
from burnish.reward.functions.reference import with_reference
from burnish.utils.errors import RewardError

Method = Literal["strict", "flexible"]

_MARK = re.compile(r"(?<!#)####(?!#)([^\n#]*)")


def extract_solution(solution_str: str, method: Method = "strict") -> Fraction | None:
    """The number that a response gives as its answer, None if it gives none.

    Raises:
        RewardError: an unknown ``method``.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"The method {method!r} of gsm8k's extract_solution must be 'strict' or 'flexible'.")
    text = to_ascii(solution_str)
    marked = _last_marked(text)
    if method == "strict":
        return leading_number(marked[1]) if marked else None
    boxed = last_boxed(text)
    if boxed is not None and (marked is None or boxed[0] > marked[0]):
        return only_number(boxed[1])
    return leading_number(marked[1]) if marked else last_number(text)


def _last_marked(text: str) -> tuple[int, str] | None:
    """Where the last ``####`` with a number behind it starts, and the rest of its line."""
    for mark in reversed(list(_MARK.finditer(text))):
        if begins_with_number(mark.group(1)):
            return mark.start(), mark.group(1)
    return None


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The ground truth after ``####``: right by both methods."""
    return f"#### {number_text(truth_numbers(ground_truth)[0])}"


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """``score`` for the right answer, ``format_score`` for a wrong one, 0 where no answer is found.

    Args:
        ground_truth: a number, a text with one, or a list of those, any of which is right.

    Raises:
        RewardError: the ground truth is no number.
    """
    truths = truth_numbers(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if is_any(answer, truths) else format_score
