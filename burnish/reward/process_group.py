"""Ending processes with all that they started, also when the one who would end them is gone."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Reads "+pid" and "-pid" lines; at a "." or when its input ends, the groups that were not taken off again are killed.
_GUARD = """
import os, sys
groups = set()
for line in sys.stdin:
    if line[0] == ".":
        break
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""


class Guard:
    """A small process that kills process groups when this process ends, however it ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def watch(self, group: int) -> None:
        """Kill this group when this process is gone."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It ended: its number may be somebody else's by then."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard; the groups that it still watches are killed."""
        # Told, since its input does not end while a process that was forked from this one holds the other end.
        self._say(".\n")
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads its group, the group, and its descendants that made groups of their own; waits for it."""
    if process.poll() is None:
        descendants = list(_descendants(process.pid))
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in descendants:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # Where it ended by itself, its children are there still.


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)
