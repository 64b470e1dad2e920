"""What a right response looks like, as an attribute of the function that scores it."""

from collections.abc import Callable
from typing import Any, TypeVar

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
