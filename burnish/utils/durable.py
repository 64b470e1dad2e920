"""Files that are still there after a power cut: written, flushed to the disk, and only then named."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from burnish.utils import progress


def write_durably(path: Path, text: str) -> None:
    """Writes a small file whole or not at all: under another name, onto the disk, and then over what ``path`` held.

    Raises:
        OSError: the disk did not take it; ``path`` is as it was.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in ``folder`` onto the disk; some file systems, as of object stores, do that for files alone."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Puts every file below ``folder``, and all names, onto the disk; what is there already costs nothing."""
    for path in files_below(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        progress.tick()
    for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_folder(inner)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below ``folder``, in the order of their names."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
