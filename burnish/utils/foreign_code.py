"""Code that others wrote and that may raise anything: a reward function, a worker's method."""

import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self


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


def form(value: Any) -> str:
    """What a value is, in words: ``None``, ``a Tensor of shape (2, 3)``, ``(a Tensor of shape (), a dict)``."""
    if isinstance(value, tuple | list):
        return f"({', '.join(form(part) for part in value)})"
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if shape is not None else ""
    return "None" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{of_shape}"


def told(error: Exception, file: str | None = None) -> str:
    """Kind and message of an error that others' code raised, and where.

    Args:
        file: whose lines say most to the reader: the deepest of them is named, if any of them is involved.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    said = f"{type(error).__name__}: {error}"
    # Syntax errors name their place themselves.
    if not frames or isinstance(error, SyntaxError):
        return said
    deepest = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{said} ({Path(deepest.filename).name}, line {deepest.lineno})"
