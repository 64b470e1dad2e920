"""Signals that end a process while it still loads what it needs, and words about signals.

A KeyboardInterrupt cannot be relied on while modules are being imported: some of them catch what others raise, or raise something
else instead, so that it is lost or comes out as the traceback of an ImportError. As long as nothing has begun that could be lost,
the process had better end at once. Imports as little as can be, since until it is there Ctrl-C is a traceback.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_IMPORTS = "<frozen importlib."
"""How the file names begin of the code that imports modules."""


def end_at_ctrl_c() -> None:
    """From here on Ctrl-C ends this process at once, with a line and status 130, until another handler of it is set.

    For the first moments of a command, and the last ones. Where it is ignored, as in the background of a shell, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    end_now(number, "Stopped by Ctrl-C.")


def end_now(number: int, message: str) -> NoReturn:
    """Ends this process at once, with ``message`` and the status of a process that the signal ``number`` has ended."""
    say(message)
    os._exit(128 + number)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in ``frame``, or in what has called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False


def say(message: str) -> None:
    """Writes a line to standard error from within the handler of a signal.

    That runs in the midst of whatever else is running: neither a logger nor a stream may be used, which may be at work just now.
    Where nobody can read it, as on a terminal that was closed, it is lost.
    """
    with suppress(OSError):
        os.write(2, f"{message}\n".encode())
