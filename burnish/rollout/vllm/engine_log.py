"""What the processes of an engine print while they live, so that an error can say why they died."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from types import TracebackType

_LINES = 400


class EngineLog:
    """While it is entered, processes that start print into it; what they print also goes where it always went.

    It replaces this process's own descriptors 1 and 2 meanwhile, since those are what a process inherits.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._reader: threading.Thread | None = None
        self._saved: list[int] = []

    def __enter__(self) -> EngineLog:
        read, write = os.pipe()
        _flush()
        self._saved = [os.dup(1), os.dup(2)]
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
                os.write(terminal, data)
            *whole, rest = (rest + data).split(b"\n")
            self._lines.extend(line.decode(errors="replace").rstrip() for line in whole)
        os.close(read)
        os.close(terminal)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
