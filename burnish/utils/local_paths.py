"""What users name may be a path of this machine or no path at all.

`os.path` says of any text whether it is one, where `pathlib` raises of some: a name that is too long, a NUL in it, a folder that
may not be looked into, the home of a user who does not exist.
"""

import os
from pathlib import Path

from burnish.utils import env
from burnish.utils.errors import ConfigError

PathLike = str | os.PathLike[str]


def expanded(path: PathLike) -> Path:
    """The path with ``~`` replaced; as it is where there is no such home."""
    return Path(os.path.expanduser(path))


def named(option: str, path: PathLike) -> Path:
    """As `expanded`, of a path that the user gave as ``option`` and that is to be made, if it is not there.

    Raises:
        ConfigError: `problem` has something to say of it.
    """
    said = problem(path)
    if said is not None:
        raise ConfigError(f"{option}={shown(path)}: {said}")
    return expanded(path)


def problem(path: PathLike) -> str | None:
    """Why nothing on this machine can be called ``path``, and what to do, in words; None where something can."""
    text = os.fspath(path)
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        return "there is a character in it that no name of a file can have (\\0, or half of a pair). Leave it out."
    if ("\n" in text or "\r" in text) and not os.path.lexists(text):
        return "there is a line break in it, and nothing here is called so. Leave it out."
    home = text.partition("/")[0]
    if not home.startswith("~") or os.path.expanduser(home) != home:
        return None
    if home == "~":
        return "~ is the home of the user, who has none here. Set HOME, or name the folder itself."
    return (
        f"there is no user {home[1:]} on this machine whose home {home} could be. Name the folder itself, or write "
        f"./{home} for one that is called so."
    )


def shown(path: PathLike) -> str:
    """The path for messages, in one line and in characters that every terminal takes."""
    text = os.fspath(path)
    for mark, written in (("\0", r"\0"), ("\n", r"\n"), ("\r", r"\r")):
        text = text.replace(mark, written)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def user_cache(name: str) -> Path:
    """The folder ``burnish/NAME`` in the user's cache.

    Raises:
        ConfigError: XDG_CACHE_HOME cannot be, or the user has no home and it is not set.
    """
    return named("XDG_CACHE_HOME", env.get("XDG_CACHE_HOME") or "~/.cache") / "burnish" / name


def exists(path: PathLike) -> bool:
    """Whether there is a file or a folder, ``~`` expanded."""
    return os.path.exists(os.path.expanduser(path))


def is_file(path: PathLike) -> bool:
    """Whether there is a file, ``~`` expanded."""
    return os.path.isfile(os.path.expanduser(path))


def is_dir(path: PathLike) -> bool:
    """Whether there is a folder, ``~`` expanded."""
    return os.path.isdir(os.path.expanduser(path))
