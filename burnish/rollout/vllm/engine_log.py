"""What the processes of an engine print while they live, so that an error can say why they died."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from types import TracebackType

_LINES = 400
_HIDDEN_BYTES = 1 << 20
_LEFT = b"\0left\0"
"""Stands in the log where it was left."""


class EngineLog:
    """While it is entered, processes that start print into it; what they print also goes where it always went.

    It replaces this process's own descriptors 1 and 2 meanwhile, since those are what a process inherits.

    Args:
        hides_start: what is printed while it is entered goes nowhere else, unless it is left by an error.
    """

    def __init__(self, *, hides_start: bool = False) -> None:
        self._hides, self._hidden = hides_start, b""
        self._has_left = self._failed = False
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._reader: threading.Thread | None = None
        self._saved: list[int] = []

    def __enter__(self) -> EngineLog:
        read, write = os.pipe()
        _flush()
        self._saved = [os.dup(1), os.dup(2)]
        self._has_left = False
        # Of its own: it goes on when the other ones are closed.
        terminal = os.dup(2)
        for descriptor in (1, 2):
            os.dup2(write, descriptor)
        os.close(write)
        self._reader = threading.Thread(target=self._read, args=(read, terminal), daemon=True, name="engine-log")
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _flush()
        self._failed = kind is not None
        os.write(1, _LEFT)
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)

    def lines(self, wait_s: float = 1.0) -> list[str]:
        """The last of what they printed; `burnish.rollout.vllm.failures` finds the cause of a failure in it.

        Args:
            wait_s: how long to wait for the last words of processes that have just died.
        """
        if self._reader is not None:
            self._reader.join(wait_s)
        return list(self._lines)

    def _read(self, read: int, terminal: int) -> None:
        rest = b""
        while True:
            try:
                data = os.read(read, 65536)
            except OSError:
                break
            if not data:
                break
            with contextlib.suppress(OSError):  # Nobody may read it there any more.
                os.write(terminal, self._shown(data))
            *whole, rest = (rest + data).replace(_LEFT, b"").split(b"\n")
            self._lines.extend(line.decode(errors="replace").rstrip() for line in whole)
        os.close(read)
        os.close(terminal)

    def _shown(self, data: bytes) -> bytes:
        """What of it goes on to the terminal."""
        if self._has_left or not self._hides:
            return data.replace(_LEFT, b"")
        # The mark may come in two parts.
        before, mark, behind = (self._hidden + data).partition(_LEFT)
        if mark:
            self._has_left, self._hidden = True, b""
            return (b"" if self._hides and not self._failed else before) + behind
        self._hidden = before[-_HIDDEN_BYTES:]
        return b""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
