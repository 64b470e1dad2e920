"""Folders that are copied whole: up with the files last that say so, down all or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from burnish.utils import local_paths, progress
from burnish.utils.errors import StorageError
from burnish.utils.storage.places import digest, done, facts_of, filesystem, fresh, join, list_files, shown

# Transfers at a time: a store answers several as fast as one.
_PARALLEL = 4


def upload_folder(local: str | os.PathLike[str], url: str, last: Sequence[str] = ("manifest.json",)) -> None:
    """Copies every file below ``local`` to ``url``; the files named ``last`` (relative to it) come when all others are there.

    So whoever finds one of those finds everything. One of an earlier upload goes first. Sizes are compared afterwards.

    Raises:
        StorageError: a file did not arrive; what did stays there, without the files named ``last``.
    """
    folder = local_paths.expanded(local)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    system, target = fresh(url)
    target = target.rstrip("/")
    early = [name for name in sizes if name not in last]
    late = [name for name in last if name in sizes]
    present = list_files(url)
    for name in (name for name in last if name in present):
        done(url, "cannot be replaced", system.rm_file, f"{target}/{name}")
    for parent in sorted({str(Path(name).parent) for name in sizes} | {"."}):
        done(url, "cannot be written", system.makedirs, os.path.normpath(f"{target}/{parent}"), exist_ok=True)

    def send(name: str) -> None:
        place = f"{target}/{name}"
        done(
            join(url, name), "cannot be written", system.put_file, str(folder / name), place, callback=_signs_of_life()
        )

    for names in (early, late):
        _all_at_once(send, names)
        _compare_sizes(url, {name: sizes[name] for name in names})


def download_folder(url: str, local: str | os.PathLike[str]) -> None:
    """Copies every file below ``url`` into the folder ``local``, which appears whole or not at all.

    Raises:
        StorageError: nothing is there, something did not arrive, or ``local`` exists.
    """
    folder = local_paths.expanded(local).absolute()
    if folder.exists():
        raise StorageError(f"{shown(url)} is not downloaded: {folder} exists.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        fetch(url, facts_of(url), temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fetch(url: str, facts: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Fetches the files into ``folder``, but those that are there already; each under another name until it is whole."""
    if not facts:
        raise StorageError(f"{shown(url)}: there is no file here.")
    system, _ = filesystem(url)

    def fetch_one(name: str) -> None:
        target, size = folder / name, facts[name].get("size")
        if has_size(target, size):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Short, since the name of a file may be as long as one can be.
        unfinished = target.with_name(f".{digest(target.name)[:16]}.fetching")
        there, alive = facts[name]["name"], _signs_of_life()
        done(join(url, name), "cannot be fetched", system.get_file, there, str(unfinished), callback=alive)
        if not has_size(unfinished, size):
            raise StorageError(
                f"{shown(join(url, name))}: {unfinished.stat().st_size} bytes arrived, and its store says {size}. Try again."
            )
        os.replace(unfinished, target)

    _all_at_once(fetch_one, list(facts))


def _signs_of_life() -> Any:
    """A file of many gigabytes that comes or goes piece by piece is no hang."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"progress": lambda size, value, **keys: progress.tick()})


def has_size(file: Path, size: int | None) -> bool:
    return file.is_file() and (size is None or file.stat().st_size == size)


def _all_at_once(work: Callable[[str], None], names: Sequence[str]) -> None:
    """Calls ``work`` for every name, some at a time; the first error is raised, and what was not begun is left out."""
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="storage") as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _compare_sizes(url: str, sizes: Mapping[str, int]) -> None:
    arrived = list_files(url)
    wrong = [name for name, size in sizes.items() if arrived.get(name) != size]
    if wrong:
        has = arrived.get(wrong[0])
        raise StorageError(
            f"{shown(join(url, wrong[0]))}: {sizes[wrong[0]]} bytes were sent, and the store has "
            f"{'no such file' if has is None else f'{has} bytes'}."
        )
