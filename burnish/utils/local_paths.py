"""What users name may be a path of this machine or no path at all.

`os.path` says of any text whether it is one, where `pathlib` raises of some: a name that is too long, a NUL in it, a folder that
may not be looked into, the home of a user who does not exist.
"""

import os
from pathlib import Path

PathLike = str | os.PathLike[str]


def expanded(path: PathLike) -> Path:
    """The path with ``~`` replaced; as it is where there is no such home."""
    return Path(os.path.expanduser(path))


def exists(path: PathLike) -> bool:
    """Whether there is a file or a folder, ``~`` expanded."""
    return os.path.exists(os.path.expanduser(path))


def is_file(path: PathLike) -> bool:
    """Whether there is a file, ``~`` expanded."""
    return os.path.isfile(os.path.expanduser(path))


def is_dir(path: PathLike) -> bool:
    """Whether there is a folder, ``~`` expanded."""
    return os.path.isdir(os.path.expanduser(path))
