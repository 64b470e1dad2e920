"""The home of printing: ``from burnish.utils.console import console, error_console``.

Both are a ``rich.console.Console``, one to standard output, one to standard error, made when first asked for, so that
importing this module costs nothing. They print text as it is: brackets in a prompt are no markup and ``:name:`` is no
emoji, unless a call says ``markup=True``. What the stream's encoding has no character for is printed as its escape.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""A pipe whose other end is closed, a terminal that is."""


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """In the block what this process prints goes nowhere once nobody can read it: the terminal was closed, or the program behind
    the pipe has ended. Standard output and standard error alone, and each only where it is the process's own."""
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    for name, stream in before.items():
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _outlasting(stream))
    ours = {name: getattr(sys, name) for name in before}
    try:
        yield
    finally:
        for name, stream in before.items():
            # None where the process was started with that stream closed; whoever replaces one may close it.
            if ours[name] is not None and not ours[name].closed:
                ours[name].flush()
            if getattr(sys, name) is ours[name]:
                setattr(sys, name, stream)


def _outlasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, which loses what it cannot write since nobody reads it."""
    raw = _OutlastingFile(stream.fileno(), stream.name)
    try:
        stream.flush()
    except OSError as error:
        if error.errno not in _NOBODY_READS:
            raise
        raw.give_up()
        # What stays in its buffer is tried once more when Python ends, and would make that an error.
        stream.flush()
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        # As Python makes it under -u, where there is no buffer.
        io.BufferedWriter(raw) if is_buffered else raw,  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _OutlastingFile(io.RawIOBase):
    """What is written to a file descriptor, as long as somebody can read it.

    Args:
        name: what the stream says that it is called, which libraries ask.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
        self.give_up()
        return len(memoryview(data).cast("B"))

    def give_up(self) -> None:
        """Whatever this process and those that it starts write there from now on goes nowhere."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
