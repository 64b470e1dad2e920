r"""Scores of answers to MATH and its like, where the answer is an expression in a box.

What counts, for the truth ``\frac{1}{2}``:

====================================== ====== ========
response ends with                     strict flexible
====================================== ====== ========
``\boxed{\frac{1}{2}}``                1      1
``\boxed{\dfrac12}``                   1      1
``\boxed{1/2}``                        1      1
``\boxed{0.5}``                        1      1
``\boxed{.5\text{ cm}}``               1      1
``\fbox{$\frac{1}{2}$}``               1      1
``\boxed \frac12$``                    1      1
``\boxed{7}`` and later ``\boxed{1/2}`` 1     1
``\boxed{1/2}`` and later ``\boxed{7}`` 0     0
``\boxed{1/2 or 1/3}``                 0      0
``The answer is $1/2$.``               0      1
``1/2``                                0      0
====================================== ====== ========

The last box counts, wherever in the text it stands. Answers are compared in the form of `latex.normalise` and as numbers;
where these differ and `math_verify` is installed (``pip install 'burnish[math]'``), by computer algebra: ``\sqrt{2}/2``
is then ``\frac{1}{\sqrt{2}}``. ``reward_kwargs.algebra=false`` scores alike with and without it.
"""

from typing import Any, Literal

from burnish.reward.functions.answer import last_answer, last_boxed, number_text, truth_numbers
from burnish.reward.functions.latex import has_algebra, same_answer, same_by_algebra
from burnish.reward.functions.reference import unusable_truth, with_reference
from burnish.utils.errors import RewardError

Method = Literal["strict", "flexible"]


def truth_texts(ground_truth: Any) -> list[str]:
    """The right answers as texts: of a text (the content of its last box where it has one), a number, or a list of
    those (any is right).

    Raises:
        RewardError: it is of another type, or empty.
    """
    if isinstance(ground_truth, list) and ground_truth:
        return [text for entry in ground_truth for text in truth_texts(entry)]
    if isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool):
        return [number_text(truth_numbers(ground_truth)[0])]
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        # Of blanks at most, or a list without one.
        empty = isinstance(ground_truth, (str, list))
        why = "is empty" if empty else f"is {type(ground_truth).__name__}"
        raise unusable_truth(ground_truth, why, "a text that is not empty, a number, or a list of those")
    boxed = last_boxed(ground_truth)
    return [boxed[1] if boxed else ground_truth]


def is_right(answer: str, truths: list[str], algebra: bool = True) -> bool:
    """Whether ``answer`` equals one of ``truths``."""
    if any(same_answer(answer, truth) for truth in truths):
        return True
    return algebra and has_algebra() and any(same_by_algebra(answer, truth) for truth in truths)


def reference_solution(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> str:
    """The ground truth in a box."""
    return rf"\boxed{{{truth_texts(ground_truth)[0]}}}"


@with_reference(reference_solution)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    method: Method = "strict",
    algebra: bool = True,
    format_score: float = 0.0,
) -> float:
    """1.0 for the right answer, ``format_score`` for a wrong one, 0.0 where no answer is found.

    Args:
        ground_truth: the right answer, or a solution with the answer in a box, or a list of those.
        method: strict takes boxes only; flexible also "the answer is ...", whichever comes later.
        algebra: compare by computer algebra too, where `math_verify` is installed.

    Raises:
        RewardError: a ground truth that is no answer, or an unknown ``method``.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(f"The method {method!r} of hendrycks_math must be 'strict' or 'flexible'.")
    truths = truth_texts(ground_truth)
    boxed = last_boxed(solution_str)
    answer = last_answer(solution_str) if method == "flexible" else boxed[1] if boxed else None
    if answer is None:
        return 0.0
    return 1.0 if is_right(answer, truths, algebra) else format_score
