"""Reads what was appended to a file of JSON lines since the last look."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Tail:
    """Follows one file; it may be absent, grow, be cut or be replaced.

    Attributes:
        rows: the objects of all whole lines, in their order.
        num_broken: lines that are no JSON object.

    Args:
        shown: makes of an object what ``rows`` has of it, once, when it is read; None: it is taken as it is.
    """

    def __init__(self, path: Path, shown: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.path = path
        self._shown = shown
        self.rows: list[dict[str, Any]] = []
        self.num_broken = 0
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._before = b""

    def refresh(self) -> bool:
        """Reads on; whether there is anything new, or what was there before is there no more."""
        try:
            file = self.path.open("rb")
        except OSError:
            return self._forget()
        with file:
            # Of what was opened: another file may have its name by now, or none.
            status = os.fstat(file.fileno())
            is_other = self._file_id not in (None, (status.st_dev, status.st_ino)) or status.st_size < self._offset
            # A file that was written anew under the same name may have the same number and more bytes.
            is_other = is_other or not self._continues(file)
            changed = self._forget() if is_other else False
            self._file_id = (status.st_dev, status.st_ino)
            file.seek(self._offset)
            content = file.read()
            # The last line may be half written: it is read when it is whole.
            content = content[: content.rfind(b"\n") + 1]
            self._offset += len(content)
            self._before = (self._before + content)[-64:]
        for line in content.splitlines():
            self._take(line)
        return changed or bool(content)

    def _continues(self, file: Any) -> bool:
        start = self._offset - len(self._before)
        file.seek(start)
        return file.read(len(self._before)) == self._before

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            self.rows.append(row if self._shown is None else self._shown(row))
        else:
            self.num_broken += 1

    def _forget(self) -> bool:
        had_something = bool(self._offset)
        self.rows, self.num_broken, self._offset, self._file_id, self._before = [], 0, 0, None, b""
        return had_something
