"""Signs of life of a download from the hub: an hour of it would look like a hang, to a person and to the run's watch."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.utils import local_paths, progress

logger = logging.getLogger("burnish.model")

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_WORDS = 30.0
GIB = 2**30


class Download:
    """What has come of a model so far, by the size of its files in the hub's cache.

    Args:
        name: ``org/model``.
        folder: of the model in the cache; it need not be there yet.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, name: str, folder: Path, now: float) -> None:
        self.name, self.folder = name, folder
        self.has_spoken = False
        self._start = self._size = _bytes_below(folder)
        self._spoke = now

    def look(self, now: float) -> None:
        """Ticks where more has come since the last look, and says so every half minute; a download that stands still is none."""
        size = _bytes_below(self.folder)
        if size > self._size:
            self._size = size
            progress.tick()
            if now - self._spoke >= _SECONDS_BETWEEN_WORDS:
                self._spoke, self.has_spoken = now, True
                logger.info("Fetching %s from the hub: %.2f GiB so far.", self.name, (size - self._start) / GIB)


@contextmanager
def hub_progress(path: str) -> Iterator[None]:
    """The block reads the model at ``path``; where that is a name of the hub, a thread tells how the download gets on."""
    if local_paths.exists(path) or path.count("/") > 1:
        yield
        return
    download = Download(path, _cache_folder(path), time.monotonic())
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_SECONDS_BETWEEN_LOOKS):
            download.look(time.monotonic())

    thread = threading.Thread(target=watch, daemon=True, name="hub-progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if download.has_spoken:
        logger.info("%s is here.", path)


def _cache_folder(name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _bytes_below(folder: Path) -> int:
    """Of the files themselves: a snapshot links to them. Files may go while they are looked at."""
    total = 0
    for file in (folder / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total
