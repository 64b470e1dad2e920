r"""Scores of answers to GSM8K and its like, where the answer is one number.

What counts as the answer, for the truth 1234:

================================ ====== ========
response ends with               strict flexible
================================ ====== ========
``#### 1234``                    1      1
``#### 1,234``                   1      1
``#### $1234``                   1      1
``#### 1234.``                   1      1
``#### 1234.00``                 1      1
``#### 1`` and later ``#### 1234`` 1    1
``#### 1234`` and later ``#### 1`` 0    0
``The answer is \boxed{1234}``   0      1
``The answer is 1234.``          0      1
``#### about 1234``              0      1
================================ ====== ========

A Unicode minus counts as a minus. The whole text is searched. flexible takes the last ``#### number`` or ``\boxed{}``,
whichever comes later, and where the text has neither, its last number.
"""

import re
from decimal import Decimal
from typing import Any, Literal

from burnish.reward.functions.answer import (
    NUMBER_PATTERN,
    is_any,
    last_boxed,
    last_number,
    only_number,
    parse_number,
    to_ascii,
    truth_numbers,
)
from burnish.utils.errors import RewardError

Method = Literal["strict", "flexible"]

_STRICT = re.compile(rf"(?<!#)####[ \t]*({NUMBER_PATTERN})")


def extract_solution(solution_str: str, method: Method = "strict") -> Decimal | None:
    """The number that a response gives as its answer, None if it gives none.

    Raises:
        RewardError: an unknown ``method``.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"The method {method!r} of gsm8k's extract_solution must be 'strict' or 'flexible'.")
    text = to_ascii(solution_str)
    all_marked = list(_STRICT.finditer(text))
    marked = all_marked[-1] if all_marked else None
    if method == "strict":
        return parse_number(marked.group(1)) if marked else None
    boxed = last_boxed(text)
    if boxed is not None and (marked is None or boxed[0] > marked.start()):
        return only_number(boxed[1])
    return parse_number(marked.group(1)) if marked else last_number(text)


def compute_score(
    solution_str: str,
    ground_truth: Any,
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
