"""What is printed goes to whoever reads it, and nowhere once nobody does."""

import os
import pty
import subprocess
import sys

import pytest

# Prints, is told that nobody reads any more, prints on, and writes beside its streams how it went.
PROGRAM = """
import os, subprocess, sys, warnings
from burnish.utils.console import console, readers_may_leave
report = os.fdopen(int(sys.argv[1]), "w")
with readers_may_leave():
    assert sys.stdout.isatty() == sys.__stdout__.isatty()
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
        seen += os.read(reader, 1000)
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
