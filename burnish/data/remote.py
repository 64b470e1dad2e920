"""Data files at places that URLs name. They are read from a copy on this machine, which is fetched once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

from burnish.utils import storage

_WEB = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file; as text its URL without credentials, which messages name instead of the copy."""

    url: str

    def __str__(self) -> str:
        return storage.shown(self.url)

    @property
    def name(self) -> str:
        """Its own name, without folders and query."""
        return storage.name_of(self.url)

    @property
    def suffix(self) -> str:
        """The end of its name."""
        return Path(self.name).suffix

    def local(self) -> Path:
        """Its copy on this machine.

        Raises:
            StorageError: it cannot be fetched.
        """
        return Path(storage.localize(self.url))

    def open(self, mode: Literal["rb"] = "rb") -> BufferedReader:
        """The copy, opened."""
        return self.local().open(mode)


def is_remote_pattern(name: str) -> bool:
    """Whether a URL has wildcards; the question mark of a web address begins a query."""
    return any(mark in name for mark in "*[") or ("?" in name and not _WEB.match(name))


def remote_files(name: str) -> Iterator[RemoteFile]:
    """The files that a URL names: those that match it, those right in a folder, or itself.

    Raises:
        StorageError: it cannot be listed.
    """
    if is_remote_pattern(name):
        urls = storage.matching(name)
    elif storage.is_folder(name):
        urls = storage.files_in(name)
    else:
        urls = [name]
    return map(RemoteFile, urls)
