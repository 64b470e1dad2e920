"""What happened in a run, one line each: ``events.jsonl`` in its folder.

``{"time": unix seconds, "step": 7 or null, "kind": "checkpoint", "message": "a sentence", ...}``. Metrics say how a run goes;
events say what became of it: starts, resumes, checkpoints, deaths of workers, ends.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from burnish.utils import local_paths
from burnish.utils.json_lines import append_whole_line, encode_line, read_lines
from burnish.utils.secrets import redact

EVENTS_FILE = "events.jsonl"

KINDS = (
    "start",
    "resume",
    "checkpoint",
    "checkpoint_removed",
    "validation",
    "restart",
    "worker_death",
    "hang",
    "signal",
    "out_of_disk",
    "profile",
    "warning",
    "end",
)
"""The kinds that burnish writes; code of one's own may write others."""

logger = logging.getLogger("burnish.events")


class EventLog:
    """Appends to the events of a run; any number of processes and threads may have one for the same folder.

    Telling what happened never becomes an error of its own: where the line cannot be written, a warning says so once.

    Args:
        run_dir: the run's folder, made when the first event comes.
    """

    def __init__(self, run_dir: str | os.PathLike) -> None:
        self.path = local_paths.expanded(run_dir) / EVENTS_FILE
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called with every event of this object, for those who show it."""
        self._has_failed = False

    def write(self, kind: str, message: str, *, step: int | None = None, **fields: Any) -> None:
        """Adds one event.

        Args:
            kind: one of `KINDS`.
            message: a sentence; secrets in it, and in ``fields``, are hidden.
            step: the trainer's step that it belongs to.
            fields: whatever else is known, by name.
        """
        event = {"time": time.time(), "step": step, "kind": kind, "message": message, **fields}
        event = redact(event)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_whole_line(self.path, encode_line(event))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("Events of the run cannot be written to %s: %s.", self.path, error)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.warning("An event could not be shown.", exc_info=True)


def read_events(run_dir: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The events of a run in the order in which they were written; none where there is no file."""
    path = local_paths.expanded(run_dir) / EVENTS_FILE
    if path.is_file():
        yield from read_lines(path)
