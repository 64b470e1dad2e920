"""Code that others wrote and that may raise anything: a reward function, a worker's method."""

from types import TracebackType
from typing import Self


class Caught:
    """Holds what the block raised, for the caller to count or to wrap; ``KeyboardInterrupt`` and its like go through.

    Attributes:
        error: the exception; None where the block ended well.
    """

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False
