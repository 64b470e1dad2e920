"""A copy on this machine of what a URL names, fetched once."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.utils import env, local_paths
from burnish.utils.errors import StorageError
from burnish.utils.storage.folders import fetch, has_size
from burnish.utils.storage.places import digest, facts_of, filesystem, identity_of, is_remote, name_of, shown


def cache_folder() -> Path:
    """Where `localize` keeps what it fetched: ``$BURNISH_CACHE``, or ``burnish/downloads`` in the user's cache.

    Raises:
        ConfigError: there can be no such folder.
    """
    chosen = env.get("BURNISH_CACHE")
    return local_paths.named("BURNISH_CACHE", chosen).absolute() if chosen else local_paths.user_cache("downloads")


def localize(place: str | os.PathLike[str]) -> str:
    """A path of this machine with the content of ``place``, a file or a folder; a path of this machine comes as it is.

    A URL is fetched once into `cache_folder`, and again when its files' sizes or entity tags change. A copy appears
    whole or not at all; what an interrupted attempt has fetched is kept for the next. Processes of one machine that ask
    at the same time wait for the first, and one process gets the same copy as long as it lives.

    Raises:
        StorageError: nothing is there, it cannot be fetched, or the cache cannot be written.
    """
    text = os.fspath(place)
    if not is_remote(text):
        return text
    return _localized(text)


@functools.cache
def _localized(url: str) -> str:
    facts = facts_of(url)
    if not facts:
        raise StorageError(f"{shown(url)}: there is no file and no folder here.")
    name = name_of(url) or "root"
    # A name of a folder has 255 bytes at most, and its end tells two places apart.
    safe = re.sub(r"[^\w.-]", "_", name).encode()[:200].decode(errors="ignore")
    home = cache_folder() / f"{safe}-{digest(url.partition('?')[0])[:12]}"
    copy = home / identity_of(facts)
    try:
        # Nothing is written for a copy that is there: somebody else may have made it, in a cache that is only read here.
        if not _is_copy(copy, facts):
            home.mkdir(parents=True, exist_ok=True)
            with _lock(home / "lock"):
                if not _is_copy(copy, facts):
                    partial = home / f"{copy.name}.part"
                    partial.mkdir(exist_ok=True)
                    fetch(url, facts, partial)
                    shutil.rmtree(copy, ignore_errors=True)
                    os.replace(partial, copy)
    except OSError as error:
        raise StorageError(
            f"{shown(url)} cannot be kept in the cache at {home}: {error}. BURNISH_CACHE names another folder."
        ) from error
    return str(copy / next(iter(facts)) if _is_file(url, facts) else copy)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    import fcntl

    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _is_copy(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(has_size(folder / name, fact.get("size")) for name, fact in facts.items()) and folder.is_dir()


def _is_file(url: str, facts: Mapping[str, Mapping[str, Any]]) -> bool:
    _, path = filesystem(url)
    return len(facts) == 1 and next(iter(facts.values()))["name"].rstrip("/") == path.rstrip("/")
