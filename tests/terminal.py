"""Programs on a terminal of their own."""

import os
import pty
import subprocess
from collections.abc import Sequence

from tests.conftest import REPO


def run_on_a_terminal(command: Sequence[str], *, columns: int, lines: int, timeout: float) -> tuple[int, str]:
    """Exit status of a command and everything that it wrote to its terminal."""
    leader, follower = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=REPO,
        env=variables | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)},
        start_new_session=True,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(leader)
    return process.wait(timeout=timeout), written.decode("utf-8", "replace")
