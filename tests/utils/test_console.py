"""What is printed goes to whoever reads it, and nowhere once nobody does."""

import errno
import io
import os
import pty
import subprocess
import sys

import pytest

from burnish.utils.console import readers_may_leave

# Prints, is told that nobody reads any more, prints on, and writes beside its streams how it went.
PROGRAM = """
import os, subprocess, sys, warnings
from burnish.utils.console import console, readers_may_leave
report = os.fdopen(int(sys.argv[1]), "w")
with readers_may_leave():
    assert (sys.stdout.isatty(), sys.stdout.name) == (sys.__stdout__.isatty(), "<stdout>")
    console.print("first")
    print("first", file=sys.stderr, flush=True)
    sys.stdin.readline()
    console.print("second")
    print("x" * 100_000, flush=True)
    warnings.warn("second")
    print("\\udcff", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-c", "print(1, flush=True)"], check=True)
assert sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
print("third")
print("went well", file=report, flush=True)
"""


def start(streams: int, *flags: str) -> tuple[subprocess.Popen, int]:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", PROGRAM, str(writing)],
        stdin=subprocess.PIPE,
        stdout=streams,
        stderr=streams,
        pass_fds=[writing],
        # A terminal of another session is closed without a word to this process.
        start_new_session=True,
    )
    os.close(writing)
    os.close(streams)
    return process, reading


@pytest.mark.parametrize("flags", [(), ("-u",)])
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_what_nobody_reads_any_more_is_lost_and_the_program_ends_well(kind, flags):
    reader, streams = os.pipe() if kind == "pipe" else pty.openpty()
    process, report = start(streams, *flags)
    seen = b""
    while seen.count(b"first") < 2:
        part = os.read(reader, 1000)
        assert part, seen
        seen += part
    os.close(reader)
    process.communicate(b"\n", timeout=60)
    with os.fdopen(report) as said:
        assert said.read() == "went well\n"
    assert process.returncode == 0


def test_what_is_read_arrives_whole_and_in_order():
    reader, streams = os.pipe()
    process, report = start(streams)
    process.stdin.write(b"\n")
    process.stdin.close()
    with os.fdopen(reader, "rb") as output:
        seen = output.read()
    os.close(report)
    assert process.wait(60) == 0
    for text in (b"first\n" * 2, b"second\n" + b"x" * 100_000 + b"\n", b"\\udcff\n", b"\n1\n", b"third\n"):
        assert text in seen
    assert seen.index(b"second\n") < seen.index(b"xxx") < seen.index(b"UserWarning") < seen.index(b"third")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_that_was_started_with_a_stream_closed_ends_well(stream):
    """As by a shell's `>&-`, and by those who start daemons."""
    program = f"""
import sys
assert sys.{stream} is None
from burnish.utils.console import console, error_console, readers_may_leave
with readers_may_leave():
    console.print("said")
    error_console.print("said")
assert sys.{stream} is None
"""
    closed = {"stdout": ">&-", "stderr": "2>&-"}[stream]
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "said\n")


def test_a_disk_without_room_is_not_a_reader_who_has_left(monkeypatch):
    class Full(io.FileIO):
        has_room = False

        def write(self, data):
            if not self.has_room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    reader, descriptor = os.pipe()
    file = Full(descriptor, "w")
    stream = io.TextIOWrapper(io.BufferedWriter(file))
    stream.write("not said yet")
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(OSError, match="No space left"), readers_may_leave():
        pass
    file.has_room = True
    stream.close()
    assert os.read(reader, 100) == b"not said yet"
    os.close(reader)
