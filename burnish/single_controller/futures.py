"""The result of one rank of a call that may still be running."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class RankFuture(ABC):
    """What a rank will return. It may travel to another worker as an argument."""

    @abstractmethod
    def get(self) -> Any:
        """Waits for the result.

        Raises:
            WorkerError: the call failed on this rank or on another one.
        """


class ReadyFuture(RankFuture):
    """A result that is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        """The result."""
        return self._value


def fetch(futures: Sequence[RankFuture]) -> list[Any]:
    """Waits for all results."""
    return [future.get() for future in futures]
