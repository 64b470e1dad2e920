"""What `data.train_files` and `data.val_files` name -> sources of rows: files, patterns, folders, each of them on this machine or
at a URL, and data sets of the hub.

Rows of a file are counted from 0.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from burnish.config.data_names import HubName, hub_name, is_pattern, matches
from burnish.data import hub
from burnish.data.problems import Place, RowError
from burnish.data.readers import READERS, ReadRow, Row, drop_null_keys, format_of, read_file, replace_surrogates
from burnish.data.remote import RemoteFile, is_remote_pattern, remote_files
from burnish.utils import local_paths, storage
from burnish.utils.errors import DataError, StorageError

__all__ = [
    "READERS", "LocatedRow", "Row", "Source", "drop_null_keys", "read_rows", "read_source", "replace_surrogates",
    "resolve_files", "sources_of",
]  # fmt: skip

LocatedRow = tuple[str, Row]
Source = Path | RemoteFile | HubName
"""A file of `READERS`, here or elsewhere, a folder that ``datasets`` saved, or a data set of the hub."""

F = TypeVar("F", Path, RemoteFile)

_OTHER_SPLITS = {"train": ("test", "val", "valid", "validation", "dev", "eval"), "val": ("train",)}


def resolve_files(files: str | Path | Sequence[str | Path], key: str = "data.train_files") -> list[Path]:
    """As `sources_of`, where only files will do; those at URLs are fetched.

    Raises:
        DataError: as `sources_of`, or a data set of the hub or of the ``datasets`` library is named.
    """
    found: list[Path] = []
    for source in sources_of(files, key):
        if isinstance(source, HubName) or (isinstance(source, Path) and source.is_dir()):
            raise DataError(f"{key}={source}: files are needed here; save the data set as parquet or jsonl.")
        found.append(source if isinstance(source, Path) else _fetched(source))
    return found


def sources_of(files: str | Path | Sequence[str | Path], key: str = "data.train_files") -> list[Source]:
    """The sources that ``key`` names, in order, ``~`` expanded: patterns become the files that they match, and folders
    the files in them, sorted by name.

    Raises:
        DataError: nothing is named, something does not exist, or is of a format that is not read.
    """
    named = [files] if isinstance(files, (str, Path)) else list(files)
    if not named:
        raise DataError(f"{key} names no file.")
    return [source for name in named for source in _sources_of(str(name), key)]


def _sources_of(name: str, key: str) -> list[Source]:
    if storage.is_remote(name) and hub_name(name) is None:
        return _sources_at(name, key)
    path = local_paths.expanded(name)
    if local_paths.is_dir(path):
        return [path] if hub.is_saved(path) else _files_in(path, name, key)
    if local_paths.is_file(path):
        return [_of_known_format(path, name, key)]
    if is_pattern(name):
        found = matches(name)
        if not found:
            raise DataError(f"{key}={name}: no file matches this pattern (looked in {path.parent.absolute()}).")
        return [_of_known_format(file, name, key) for file in found]
    on_hub = hub_name(name)
    if on_hub is not None:
        return [on_hub]
    raise DataError(
        f"{key}={name}: there is no such file (looked for {path.absolute()}). A file, a pattern, a folder or a data set of "
        f"the hub is named here, the last one as org/name, org/name:configuration or org/name:configuration:split."
    )


def _sources_at(url: str, key: str) -> list[Source]:
    """As `_sources_of`, of a URL."""
    name = storage.shown(url)
    try:
        is_folder = not is_remote_pattern(url) and storage.is_folder(url)
        if is_folder and any(storage.exists(storage.join(url, mark)) for mark in hub.SAVED_MARKS):
            return [Path(storage.localize(url))]
        files = list(remote_files(url))
        if not is_folder and not is_remote_pattern(url) and not storage.exists(url):
            raise DataError(f"{key}={name}: there is no such file.")
    except StorageError as error:
        raise DataError(f"{key}: {error}") from error
    if is_folder:
        return list(_data_files(files, name, key))
    if not files:
        raise DataError(f"{key}={name}: no file matches this pattern.")
    return [_of_known_format(file, name, key) for file in files]


def _fetched(source: RemoteFile) -> Path:
    try:
        return source.local()
    except StorageError as error:
        raise DataError(str(error)) from error


def _of_known_format(path: F, name: str, key: str) -> F:
    if format_of(path) is None:
        which = "" if str(path) == name else f" ({path})"
        raise DataError(
            f"{key}={name}{which}: files whose names end in {', '.join(READERS)} are read, not {path.suffix!r}."
        )
    return path


def _files_in(folder: Path, name: str, key: str) -> list[Source]:
    return list(_data_files([path for path in sorted(folder.iterdir()) if path.is_file()], name, key))


def _data_files(present: Sequence[F], name: str, key: str) -> list[F]:
    """The data files among those right in the folder ``name``. Those of training and of testing are not taken for one set."""
    folder = name.rstrip("/")
    files = [path for path in present if not path.name.startswith((".", "_")) and format_of(path) is not None]
    if not files:
        raise DataError(
            f"{key}={name}: this folder holds no file whose name ends in {', '.join(READERS)}. Files of folders in it are "
            f"named by a pattern, as {folder}/**/*.parquet."
        )
    split = "train" if "train" in key.rpartition(".")[2] else "val"
    words = {path: set(path.name.lower().replace("-", ".").replace("_", ".").split(".")) for path in files}
    others = [path for path in files if words[path] & set(_OTHER_SPLITS[split])]
    if others and len(others) < len(files):
        own = next(path for path in files if path not in others)
        raise DataError(
            f"{key}={name}: this folder holds {own.name} and {others[0].name}, which look like data of training and of "
            f"testing. Name the files, or a pattern such as {folder}/{own.name.split('.')[0].split('-')[0]}*."
        )
    return files


def read_source(source: Source, split: str = "train") -> Iterator[ReadRow]:
    """The rows of a source with JSON's types in their cells, each with its place; lazily.

    A row that cannot be read comes as the `RowError` that says why.

    Args:
        split: "train" or "val", for data sets that have several and name none.

    Raises:
        DataError: the source cannot be read, from some row on.
    """
    if isinstance(source, RemoteFile):
        return _read_remote(source)
    if isinstance(source, HubName) or source.is_dir():
        return hub.read_dataset(source, split)
    return read_file(source)


def _read_remote(source: RemoteFile) -> Iterator[ReadRow]:
    """The rows of the copy; places and errors name the URL."""
    copy, url = _fetched(source), str(source)
    try:
        for place, row in read_file(copy):
            there = place._replace(file=url)
            yield there, row.at(there) if isinstance(row, RowError) else row
    except DataError as error:
        raise DataError(str(error).replace(str(copy), url)) from error


def read_rows(path: Path) -> list[LocatedRow]:
    """All rows of one file, each with its place in words ("train.parquet, row 3").

    Raises:
        DataError: the file is not of the format that its name says, or a row of it is no object.
    """
    return [(str(place), row) for place, row in sound(read_source(path))]


def sound(rows: Iterator[ReadRow]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows; the first that cannot be read is raised."""
    for place, row in rows:
        if isinstance(row, RowError):
            raise row
        yield place, row
