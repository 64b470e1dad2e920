"""Errors that a worker hands back as its answer.

A worker that raises ends its group, since its peers may wait for it. Where all ranks come to the end together, as in saving and
loading a checkpoint, the error is an answer like another, and the trainer decides whether the run goes on.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from burnish.utils.errors import CheckpointError


def hands_back_errors(method: Callable) -> Callable:
    """Of a worker's method: what it raises as `CheckpointError` becomes its result."""

    @wraps(method)
    def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except CheckpointError as error:
            return error

    return answering


def checked(answers: Iterable[Any]) -> list[Any]:
    """The answers of all ranks.

    Raises:
        CheckpointError: the first of those that a rank handed back.
    """
    listed = list(answers)
    for answer in listed:
        if isinstance(answer, CheckpointError):
            raise answer
    return listed
