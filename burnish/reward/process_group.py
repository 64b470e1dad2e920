"""Ending processes with all that they started, also when the one who would end them is gone."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Reads "+pid" and "-pid" lines; at a "." or when its input ends, the groups that were not taken off again are killed, and then
# every process in whose environment the mark stands.
_GUARD = """
import os, sys, time
if os.fork():
    os._exit(0)
mark = sys.argv[1].encode()
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

def is_marked(pid):
    try:
        with open("/proc/" + pid + "/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False

for look in range(100 if mark and os.path.isdir("/proc/self") else 0):
    marked = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_marked(pid)]
    if not marked:
        break
    for pid in marked:
        try:
            os.kill(int(pid), 9)
        except OSError:
            pass
    time.sleep(0.01)
"""


class Guard:
    """A small process that kills process groups when this process ends, however it ends.

    Args:
        mark: a text that stands in the environment of processes which are killed then too, whatever groups they have made for
            themselves (Linux only); empty: of none.
    """

    def __init__(self, mark: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        # The guard itself is its child, and nobody's then: Ray kills the children of a worker that it ends.
        self._process.wait()

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
        assert self._process.stdout is not None  # The guard has its other end, and nobody else.
        with self._process.stdout as until_it_ends:
            until_it_ends.read()

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
