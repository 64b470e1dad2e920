"""Places that a URL names (``s3://``, ``hdfs://``, ``gs://``, ``file://``, ``memory://`` ...), through fsspec.

Credentials and addresses are what fsspec's own packages read: their environment variables and files, and fsspec's
(``FSSPEC_S3_ENDPOINT_URL``, ``~/.config/fsspec/*.json``). Every function takes a path of this machine as well.

What goes wrong at such a place is a `StorageError`: a sentence with the place, without the passwords in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from burnish.utils import local_paths
from burnish.utils.errors import StorageError
from burnish.utils.foreign_code import Caught
from burnish.utils.secrets import redact_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# "pkg://module:attribute" names code.
_NO_PLACES = ("pkg",)
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)(?:::|://)")
# What the package is called that a protocol needs, where its name does not say.
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs",
    "oss": "ossfs", "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "hf": "huggingface_hub",
}  # fmt: skip
_INSTALLED_AS = {"s3fs": "'burnish[s3]'"}
# Facts of a listing that change with a file's content, the telling ones first.
_CONTENT_FACTS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "checksum", "sha256", "oid")
_TIME_FACTS = ("LastModified", "last_modified", "mtime", "modificationTime", "updated", "created")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL; by the text alone."""
    found = _SCHEME.match(os.fspath(path))
    return found is not None and found["scheme"].lower() not in _NO_PLACES


def join(place: str | os.PathLike[str], *names: str) -> str:
    """A place below ``place``."""
    return "/".join([os.fspath(place).rstrip("/"), *(name.strip("/") for name in names)])


def name_of(place: str | os.PathLike[str]) -> str:
    """The last part of a place's name."""
    return os.fspath(place).partition("?")[0].rstrip("/").rpartition("/")[2]


def shown(place: str | os.PathLike[str]) -> str:
    """``place`` without what a signed URL carries (``?sig=...``) and without user and password, for messages and files."""
    text = os.fspath(place)
    if is_remote(text):
        address, mark, _ = text.partition("?")
        text = f"{address}?..." if mark else address
    return redact_text(text)


def filesystem(place: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """fsspec's file system of ``place``, and the path in it.

    Raises:
        StorageError: nobody knows the protocol, its package is missing, or it cannot be reached.
    """
    from fsspec.core import url_to_fs

    text = os.fspath(place)
    if not is_remote(text):
        text = str(local_paths.expanded(text).absolute())
    scheme = found["scheme"].lower() if (found := _SCHEME.match(text)) else "file"
    with Caught() as caught:
        system, path = url_to_fs(text)
    if isinstance(caught.error, ImportError):
        how = f"by a package that is not installed ({_first_line(caught.error)})"
        if package := _PACKAGES.get(scheme):
            how = f"by the package {package}, which is not installed: pip install {_INSTALLED_AS.get(package, package)}"
        raise StorageError(f"{shown(place)}: places of {scheme}:// are read {how}.") from caught.error
    if isinstance(caught.error, ValueError) and "Protocol not known" in str(caught.error):
        raise StorageError(
            f"{shown(place)}: fsspec knows no places of {scheme}://. Name a path of this machine, or a URL such as "
            f"s3://bucket/folder, gs://bucket/folder or hdfs://host:port/folder."
        ) from caught.error
    if caught.error is not None:
        raise _error(place, "cannot be reached", caught.error) from caught.error
    return system, path


# ------------------------------------------------------------------------------------ asking, and small files


def exists(place: str | os.PathLike[str]) -> bool:
    """Whether there is a file or a folder."""
    system, path = fresh(place)
    return bool(done(place, "cannot be asked for", system.exists, path))


def is_folder(place: str | os.PathLike[str]) -> bool:
    """Whether there is a folder; where a store has none, whether names begin with it."""
    system, path = fresh(place)
    return bool(done(place, "cannot be asked for", system.isdir, path))


def list_folders(place: str | os.PathLike[str]) -> list[str]:
    """The names of the folders right in ``place``, sorted; none where it does not exist."""
    return sorted(_names(place, "directory"))


def list_files(place: str | os.PathLike[str]) -> dict[str, int]:
    """Bytes of every file below ``place``, by its name relative to it; none where it does not exist."""
    return {name: int(facts.get("size") or 0) for name, facts in facts_of(place).items()}


def matching(pattern: str) -> list[str]:
    """The URLs of the files that a pattern names, sorted; ``**`` goes through folders."""
    system, path = fresh(pattern)
    found = done(pattern, "cannot be listed", system.glob, path, detail=True)
    return sorted(system.unstrip_protocol(name) for name, facts in found.items() if facts["type"] == "file")


def files_in(place: str | os.PathLike[str]) -> list[str]:
    """The URLs of the files right in a folder, sorted."""
    return [join(place, name) for name in sorted(_names(place, "file"))]


@contextmanager
def open_file(place: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The file, opened for reading; what reading raises comes as it is."""
    system, path = filesystem(place)
    file = done(place, "cannot be opened", system.open, path, "rb")
    with file:
        yield file


def read_text(place: str | os.PathLike[str]) -> str:
    """The text of a small file."""
    system, path = fresh(place)
    return done(place, "cannot be read", system.cat_file, path).decode("utf-8")


def write_text(place: str | os.PathLike[str], text: str) -> None:
    """Writes a small file, over one that is there."""
    system, path = filesystem(place)
    done(place, "cannot be written", system.makedirs, system._parent(path), exist_ok=True)
    done(place, "cannot be written", system.pipe_file, path, text.encode("utf-8"))


def remove_folder(place: str | os.PathLike[str], first: Sequence[str] = ("manifest.json",)) -> None:
    """Removes a folder with all that is in it, the files named ``first`` before the others; nothing where it is not there."""
    system, path = fresh(place)
    present = list_files(place)
    for name in (name for name in first if name in present):
        done(place, "cannot be removed", system.rm_file, f"{path.rstrip('/')}/{name}")
    if done(place, "cannot be asked for", system.exists, path):
        done(place, "cannot be removed", system.rm, path, recursive=True)


def identity(place: str | os.PathLike[str]) -> str:
    """What changes when the content of a file, or of a file below a folder, does, as its store tells: size and entity tag,
    or the time of its last change where there is no tag.

    Raises:
        StorageError: nothing is there.
    """
    facts = facts_of(place)
    if not facts:
        raise StorageError(f"{shown(place)}: there is no file here.")
    return identity_of(facts)


# ------------------------------------------------------------------------------- what other files here share


def fresh(place: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """As `filesystem`, with nothing remembered of what was there before."""
    system, path = filesystem(place)
    system.invalidate_cache()
    return system, path


def facts_of(place: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """What the store tells of every file below ``place``, by relative name, sorted; of a file by its own name."""
    system, path = fresh(place)
    found = done(place, "cannot be listed", system.find, path, detail=True)
    below = path.rstrip("/") + "/"
    facts = {}
    for name, fact in sorted(found.items()):
        if fact.get("type", "file") == "file" and not name.endswith("/"):
            facts[name.removeprefix(below) if name.startswith(below) else name_of(name)] = fact
    return facts


def identity_of(facts: Mapping[str, Mapping[str, Any]]) -> str:
    told = {name: [fact.get("size"), _telling(fact)] for name, fact in facts.items()}
    return digest(json.dumps(told, sort_keys=True, default=str))[:20]


def done(place: str | os.PathLike[str], what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the file system's ``call`` returns; whatever it raises becomes a `StorageError`."""
    with Caught() as caught:
        return call(*args, **kwargs)
    assert caught.error is not None
    raise _error(place, what, caught.error) from caught.error


def _names(place: str | os.PathLike[str], kind: str) -> list[str]:
    system, path = fresh(place)
    if not done(place, "cannot be listed", system.isdir, path):
        return []
    entries = done(place, "cannot be listed", system.ls, path, detail=True)
    names = [name_of(entry["name"]) for entry in entries if entry["type"] == kind]
    # Some stores list the folder itself as an empty file in it.
    return [name for name in names if name and not (kind == "file" and name == name_of(path) and len(entries) > 1)]


def _telling(fact: Mapping[str, Any]) -> str:
    return next((str(fact[key]) for key in (*_CONTENT_FACTS, *_TIME_FACTS) if fact.get(key) is not None), "")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _error(place: str | os.PathLike[str], what: str, error: Exception) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{shown(place)}: there is no such file or folder.")
    return StorageError(f"{shown(place)} {what}: {type(error).__name__}: {_first_line(error)}.")


def _first_line(error: Exception) -> str:
    return redact_text((str(error).strip() or "no reason was given").splitlines()[0][:300]).rstrip(".")
