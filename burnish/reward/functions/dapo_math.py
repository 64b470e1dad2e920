r"""Scores of answers to DAPO's mathematics and AIME (arXiv:2503.14476): 1 for right, -1 for wrong.

What counts, for the truth 34:

=================================== ====== ========
response ends with                  strict flexible
=================================== ====== ========
``Answer: 34``                      1      1
``Answer: $34$``                    1      1
``**Answer:** 34.``                 1      1
``Answer: \boxed{34}``              1      1
``Answer: 034``                     1      1
``Answer: 34.0``                    1      1
``Answer: 7`` and later ``Answer: 34`` 1   1
``Answer: 34`` and later ``Answer: 7`` -1  -1
``Answer: 34 (since 68/2 = 34)``    1      1
``Answer: 34 or 35``                -1     -1
``The answer is 34.``               1      1
``\boxed{34}``                      -1     1
``34``                              -1     -1
=================================== ====== ========

The default is flexible. strict is what DAPO's prompt asks for, a line "Answer: ...". The whole text is searched, not its
last 300 characters.
"""

from typing import Any, Literal

from burnish.reward.functions.answer import last_answer, last_boxed, last_stated
from burnish.reward.functions.hendrycks_math import is_right, truth_texts
from burnish.reward.functions.reference import with_reference
from burnish.utils.errors import RewardError

Method = Literal["strict", "flexible"]


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The ground truth after "Answer:"."""
    return f"Answer: {truth_texts(ground_truth)[0]}"


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    method: Method = "flexible",
    algebra: bool = False,
) -> dict[str, Any]:
    """The score of the last "Answer: ..." (flexible: or of the last box, whichever comes later).

    Args:
        ground_truth: the right answer, or a list of right ones.
        algebra: compare by computer algebra too, where `math_verify` is installed.

    Returns:
        ``score`` 1.0 or -1.0; ``acc``, whether it is right; ``pred``, the answer found, "" if there is none.

    Raises:
        RewardError: a ground truth that is no answer, or an unknown ``method``.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"The method {method!r} of dapo_math must be 'strict' or 'flexible'.")
    truths = truth_texts(ground_truth)
    pred = (last_answer(solution_str) if method == "flexible" else _stated(solution_str)) or ""
    acc = bool(pred) and is_right(pred, truths, algebra)
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}


def _stated(text: str) -> str | None:
    stated = last_stated(text)
    if stated is None:
        return None
    boxed = last_boxed(stated[1])
    return boxed[1] if boxed else stated[1]
