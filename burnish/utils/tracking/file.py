"""Metrics as JSON lines in the run's folder; every run has them."""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from burnish.utils.json_lines import read_lines, write_atomically
from burnish.utils.tracking.base import LOGGERS, RunInfo

METRICS_FILE = "metrics.jsonl"
# Lines that wait for a disk that is full; the oldest go first.
_MOST_WAITING = 10_000

logger = logging.getLogger("burnish.tracking")


@LOGGERS.register("file")
class FileLogger:
    """``metrics.jsonl``: one JSON object a line, ``{"step": 1, ...}``, with all digits; a resumed run appends.

    Not-a-number and infinities are written as ``NaN`` and ``Infinity``, as Python's json does and reads. Lines that the disk
    does not take wait, and are written before the next one that it does take.
    """

    in_turn = True

    def __init__(self, info: RunInfo) -> None:
        self.path = info.run_dir / METRICS_FILE
        _drop_partial_line(self.path)
        _set_aside_later_lines(self.path, info.resumed_step)
        self._file = self.path.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Appends the line of ``step`` and hands it to the system."""
        self._waiting.append(json.dumps({"step": step, **data}).encode() + b"\n")
        del self._waiting[:-_MOST_WAITING]
        self._write()

    log_partial = log

    def _write(self) -> None:
        text = b"".join(self._waiting)
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(text)
            if written != len(text):
                raise OSError(f"{written} of {len(text)} bytes were written")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written: %s. Its lines wait until it can.", self.path, error)
        else:
            self._waiting = []

    def finish(self) -> None:
        """Closes the file."""
        if self._file.closed:
            return
        if self._waiting:
            self._write()
        if self._waiting:
            logger.warning("%s lacks the last %d steps: the disk did not take them.", self.path, len(self._waiting))
        self._file.close()


def _drop_partial_line(path: Path) -> None:
    """Removes what a killed run left of its last line, to which the next line would stick."""
    if not path.exists():
        return
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _set_aside_later_lines(path: Path, resumed_step: int) -> None:
    """Moves lines of steps that are run again, and all lines before a run from the start, to ``metrics.N.jsonl``."""
    if not path.exists():
        return
    num_lines = path.read_bytes().count(b"\n")
    kept = [row for row in read_lines(path) if resumed_step and row.get("step", 0) <= resumed_step]
    if len(kept) == num_lines:
        return
    number = next(n for n in itertools.count(1) if not (path.parent / f"metrics.{n}.jsonl").exists())
    # A copy first: whatever ends the process here, no line is lost.
    shutil.copy2(path, path.parent / f"metrics.{number}.jsonl")
    write_atomically(path, kept)
    logger.warning(
        "%s held %d lines of an earlier run beyond step %d: they are in metrics.%d.jsonl now.",
        *(path, num_lines - len(kept), resumed_step, number),
    )
