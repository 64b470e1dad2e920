"""JSON-lines files: one object a line, UTF-8 as it is, whole lines or none, whatever the values are."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from burnish.utils.errors import ConfigError


def encode_line(row: Mapping[str, Any]) -> bytes:
    """``row`` as one line with its end.

    Text stays text instead of becoming escapes. A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for
    it and is read back as it was. NaN and infinities are written as Python's json writes and reads them. What JSON cannot hold
    is written as its ``str``.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, default=plain)
    except (TypeError, ValueError, RecursionError):
        # A key that is no text, a value that holds itself.
        text = json.dumps(_printable(row), ensure_ascii=False, default=plain)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """A value of numpy or torch as what JSON knows; anything else as its ``str``."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _printable(value: Any, depth: int = 0) -> Any:
    if depth > 50:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): _printable(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry, depth + 1) for entry in value]
    return value


def read_lines(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a file in their order; a line that is no object, as a killed run leaves half of one, is passed over."""
    with Path(path).open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def write_atomically(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All ``rows`` under the name ``path``, or, if anything goes wrong, what was there before."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for row in rows:
            file.write(encode_line(row))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``; what the block writes there gets that name when it ends without an error.

    The temporary name is always the same, so that what a killed process has left is written over by the next one; it is locked,
    so that two at once do not write into each other's. A link stays one, and leads to what was written. What is there and is no
    file, as a pipe or ``/dev/stdout``, is given to the block itself: nothing else may take its place.

    Raises:
        ConfigError: another process is writing the file at this moment.
        OSError: the folder cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _refuse_two(handle, path)
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)


def _refuse_two(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path}: another process is writing this file just now. Name another one, or wait until it is written."
        ) from None
    except OSError:
        # Not every file system knows locks.
        return


def append_whole_line(path: Path, line: bytes) -> None:
    """Appends ``line`` in one write, so that processes may share the file; half a line that a killed one left is ended first.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _await_turn(handle)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            # Where the disk is full the first write takes a part, and the second one says why.
            line = line[os.write(handle, line) :]
    finally:
        os.close(handle)


def _await_turn(handle: int, patience_s: float = 1.0) -> None:
    """Locks the file until it is closed: a line that another process is still writing looks like half a line.

    Whoever gets no lock in time writes nevertheless, an empty line may come of it then: the lock's holder may be a stopped
    process, or the very thread whose signal handler is appending now, and a file system may know no locks.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return None
            time.sleep(0.001)
        except OSError:
            return None
