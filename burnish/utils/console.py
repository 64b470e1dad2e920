"""The home of printing: ``from burnish.utils.console import console, error_console``.

Both are a ``rich.console.Console``, one to standard output, one to standard error, made when first asked for, so that
importing this module costs nothing. They print text as it is: brackets in a prompt are no markup and ``:name:`` is no
emoji, unless a call says ``markup=True``. What the stream's encoding has no character for is printed as its escape.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    console: Console
    error_console: Console


@cache
def _make_console(stderr: bool) -> "Console":
    from rich.console import Console

    class AnyText(Console):
        @Console.file.getter  # type: ignore[attr-defined]
        def file(self) -> Any:
            stream = super().file
            # As Python has it on standard error. What is refused would stay in rich's buffer, in the way of all that follows.
            if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            return stream

    return AnyText(stderr=stderr, markup=False, emoji=False, highlight=False)


def __getattr__(name: str) -> Any:
    if name in ("console", "error_console"):
        return _make_console(stderr=name == "error_console")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def outliving_the_reader() -> Iterator[None]:
    """In the block a pipe that nobody reads any more is an error like others; a console ends the program there.

    Raises:
        BrokenPipeError: the reader is gone. The console prints nothing from then on.
    """
    try:
        yield
    except SystemExit as error:
        raise BrokenPipeError("nobody reads standard output any more") from error
