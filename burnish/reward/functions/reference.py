"""What a right response looks like, as an attribute of the function that scores it; and what is said of a ground truth that
tells none."""

from collections.abc import Callable
from typing import Any, TypeVar

from burnish.utils.errors import RewardError

TRUTH_PLACES = "column reward_model.ground_truth or ground_truth, or the one that data.answer_key names"
"""Where a row may have its ground truth: a score function cannot know which of them this row had."""

Function = TypeVar("Function", bound=Callable[..., Any])
WriteReference = Callable[[Any, dict[str, Any] | None], str | None]


def with_reference(write: WriteReference) -> Callable[[Function], Function]:
    """Decorator of a score function: ``function.reference_solution(ground_truth, extra_info)`` is a response that it
    gives its full score, or None where the ground truth does not tell one. It is what a check of data and rewards
    scores before training: a right answer that scores 0 means that the two do not fit."""

    def mark(function: Function) -> Function:
        function.reference_solution = write  # type: ignore[attr-defined]
        return function

    return mark


def unusable_truth(ground_truth: Any, why: str, needed: str) -> RewardError:
    """The error of a row without a ground truth, or with one that its score function cannot use.

    Args:
        why: what is wrong with one that is there, as a clause: "holds no number".
        needed: what a ground truth must be.
    """
    said = "The row has no ground truth" if ground_truth is None else f"The ground truth {ground_truth!r:.120} {why}"
    return RewardError(f"{said}; {needed} is needed ({TRUTH_PLACES}).")
