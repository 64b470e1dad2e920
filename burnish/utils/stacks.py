"""Where the threads of a process stand: of this one, and of others that are stuck.

A process that called `make_visible` shows its stacks to processes of the same user on the same machine, without py-spy and also
when it hangs in native code that holds Python's lock: SIGUSR2 makes faulthandler write them to an anonymous file in memory,
which is found by its name among the process's open files. Where py-spy is installed it is asked first: it needs no preparation.
"""

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_NAME = "burnish-stacks"
_SECONDS_TO_WRITE = 5.0
_SECONDS_FOR_PY_SPY = 20.0
_file: int | None = None


def make_visible() -> None:
    """Lets `of_process` see this process, and shows the stacks where native code crashes. Again does nothing; Linux only."""
    global _file
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # Standard error has no file, as in some notebooks.
            faulthandler.enable(file=sys.__stderr__, all_threads=True)
    if _file is not None or not hasattr(os, "memfd_create"):
        return
    _file = os.memfd_create(_NAME)
    faulthandler.register(signal.SIGUSR2, file=_file, all_threads=True)


def of_this_process() -> str:
    """The stacks of all threads of this process, each with its name, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        calls = "".join(traceback.format_stack(frame))
        parts.append(f"Thread {ident} ({names.get(ident, 'unknown to Python')}), newest call last:\n{calls}")
    return "\n".join(parts)


def of_process(pid: int) -> str | None:
    """The stacks of all threads of a process on this machine; None where they cannot be had."""
    if pid == os.getpid():
        return of_this_process()
    return _by_py_spy(pid) or _by_signal(pid)


def of_tree(pid: int) -> str | None:
    """The stacks of a process and of those that it has started, as far as they can be had; None where none can."""
    parts = []
    for one in (pid, *descendants(pid)):
        if text := of_process(one):
            parts.append(f"Process {one}: {_command(one)}\n\n{text}")
    return "\n\n".join(parts) or None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words)[:200].replace("\n", " ")
    return ""


def _by_py_spy(pid: int) -> str | None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_SECONDS_FOR_PY_SPY
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None


def _by_signal(pid: int) -> str | None:
    shown = _shown_by(pid)
    if shown is None:
        return None
    with contextlib.suppress(OSError), open(shown, encoding="utf-8", errors="replace") as file:
        file.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR2)
        deadline, text = time.monotonic() + _SECONDS_TO_WRITE, ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = file.read()
            text += more
            if text and not more:
                break
        return text or None
    return None


def _shown_by(pid: int) -> Path | None:
    """The file that SIGUSR2 makes the process write to; None where it would end the process instead."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAME in os.readlink(file) and _catches(pid, signal.SIGUSR2):
                    return file
    return None


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and those that they have; Linux only."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def innermost(text: str) -> str | None:
    """Where the main thread stands, as ``file.py:12 in f``, from a text of this module; None where it does not say."""
    processes = re.split(r"(?m)^Process \d+: ", text)
    text, best = processes[1] if len(processes) > 1 else text, None
    # py-spy and `of_this_process` name the main thread; faulthandler writes it last.
    for part in re.split(r"(?m)^(?=(?:Current )?[Tt]hread )", text):
        frames = _frames(part)
        if frames and (best is None or "MainThread" in part or "most recent call first" in part):
            best = frames[-1] if "newest call last" in part else frames[0]
            if "MainThread" in part:
                break
    return best


def _frames(part: str) -> list[str]:
    found = [
        f"{_short(file)}:{line} in {function}"
        for file, line, function in re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', part)
    ]
    return found or [
        f"{_short(file)}:{line} in {function}"
        for function, file, line in re.findall(r"(?m)^\s+(\S+) \((.+?):(\d+)\)", part)
    ]


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:]) if Path(file).is_absolute() else file


def place(frame: FrameType) -> str:
    """A frame as ``file.py:12 in f``."""
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def write(folder: str | os.PathLike, who: str, text: str) -> Path:
    """Keeps stacks as ``<folder>/<time>-<who>.txt``; in the system's folder for temporary files where that cannot be written.

    Args:
        who: names the process; characters that file names do not like are replaced.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', who)}"
    for place in (Path(folder), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            file = _unused(place, name)
            file.write_text(text, encoding="utf-8", errors="replace")
            return file
    return Path(os.devnull)


def _unused(place: Path, name: str) -> Path:
    file, number = place / f"{name}.txt", 1
    while file.exists():
        number += 1
        file = place / f"{name}-{number}.txt"
    return file
