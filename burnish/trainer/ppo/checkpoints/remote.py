"""Checkpoints at a place that a URL names: each is copied there in the background, and a run without one goes on from there."""

import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.trainer.ppo.checkpoints.folders import TEMPORARY, TRACKER, RunFolder, step_of
from burnish.trainer.ppo.checkpoints.manifest import MANIFEST, problem_of
from burnish.utils import progress, storage
from burnish.utils.errors import CheckpointError, StorageError
from burnish.utils.foreign_code import Caught

logger = logging.getLogger("burnish.trainer")

_ATTEMPTS = 3
_SECONDS_BETWEEN_SIGNS = 10.0


class Uploads:
    """Copies finished checkpoints to ``url``, one after the other, while training goes on. Nothing is ever removed there.

    A copy that fails is tried again, and then told: an event, and a number for the metrics. The run goes on; later
    checkpoints are tried as if nothing had been.

    Args:
        url: the run's folder there.
        tell: called with kind, message and step of what happened; from the thread that copies.
        pause: seconds before an attempt is repeated; they double.
    """

    def __init__(self, url: str, tell: Callable[..., Any], *, pause: float = 5.0) -> None:
        self.url = url
        self.num_failed = 0
        self._tell = tell
        self._pause = pause
        self._waiting: deque[Path] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def add(self, folder: Path) -> None:
        """Copies the checkpoint ``folder`` as soon as those before it are there."""
        with self._changed:
            self._waiting.append(folder)
            self._changed.notify_all()
            if self._thread is None:
                # Not in the way of an interpreter that is to end at once.
                self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
                self._thread.start()

    def steps(self) -> set[int]:
        """Of the checkpoints that have not been copied yet; their folders are still needed."""
        with self._changed:
            return {step for folder in self._waiting if (step := step_of(folder)) is not None}

    def finish(self) -> None:
        """Waits until everything has been copied, or has failed."""
        with self._changed:
            if self._waiting:
                logger.info(
                    "Waiting until %d checkpoints are copied to %s.", len(self._waiting), storage.shown(self.url)
                )
            while not self._changed.wait_for(lambda: not self._waiting, timeout=_SECONDS_BETWEEN_SIGNS):
                # A copy that takes long is no run that hangs; stores have time limits of their own.
                progress.tick()
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_ending = False

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                folder = self._waiting[0]
            with Caught() as caught:
                self._copy(folder)
            if caught.error is not None:
                self.num_failed += 1
                self._tell(
                    "warning",
                    f"{folder.name} was not copied to {storage.shown(self.url)}: {caught.error} It is on this machine's disk.",
                    step=step_of(folder),
                )
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _copy(self, folder: Path) -> None:
        started, target = time.monotonic(), storage.join(self.url, folder.name)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                storage.upload_folder(folder, target, last=(MANIFEST,))
                storage.write_text(storage.join(self.url, TRACKER), str(step_of(folder)))
            except (StorageError, OSError) as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s is copied once more: %s", folder.name, error)
                time.sleep(self._pause * 2 ** (attempt - 1))
            else:
                seconds = time.monotonic() - started
                self._tell(
                    "checkpoint",
                    f"{folder.name} was copied to {storage.shown(target)} in {seconds:.1f} s.",
                    step=step_of(folder),
                    url=storage.shown(target),
                    seconds=round(seconds, 3),
                )
                return


def newest_remote(url: str) -> str | None:
    """The URL of the newest complete checkpoint below ``url``; None where there is none.

    Raises:
        StorageError: the place cannot be reached.
    """
    steps = {}
    for name in storage.list_folders(url):
        step = step_of(Path(name))
        if step is not None and storage.exists(storage.join(url, name, MANIFEST)):
            steps[step] = storage.join(url, name)
    if not steps:
        return None
    tracker = storage.join(url, TRACKER)
    last = storage.read_text(tracker).strip() if storage.exists(tracker) else ""
    return steps[int(last)] if last.isdigit() and int(last) in steps else steps[max(steps)]


def run_of(url: str) -> str | None:
    """The run that wrote the checkpoint at ``url``; None is not known."""
    return json.loads(storage.read_text(storage.join(url, MANIFEST))).get("run")


def fetch(url: str, folder: RunFolder) -> Path:
    """Downloads the checkpoint at ``url`` into the run's folder, where it is complete or not at all.

    Raises:
        CheckpointError: it cannot be fetched, or is not complete.
    """
    step = step_of(Path(storage.name_of(url)))
    if step is None:
        raise CheckpointError(f"{storage.shown(url)} is no checkpoint: its name is not global_step_N.")
    temporary = folder.root / f"{TEMPORARY}{step}_fetched"
    shutil.rmtree(temporary, ignore_errors=True)
    logger.info("Fetching %s.", storage.shown(url))
    try:
        storage.download_folder(url, temporary)
    except (StorageError, OSError) as error:
        raise CheckpointError(f"The checkpoint {storage.shown(url)} cannot be fetched: {error}") from error
    problem = problem_of(temporary)
    if problem is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"The checkpoint {storage.shown(url)} cannot be used: {problem}.")
    return folder.give_name(temporary, step)


def is_copied(url: str, local: Path) -> bool:
    """Whether ``url`` has a complete copy of the checkpoint ``local``."""
    target = storage.join(url, local.name)
    try:
        sizes = storage.list_files(target)
    except StorageError:
        return False
    return MANIFEST in sizes and all(
        sizes.get(str(path.relative_to(local))) == path.stat().st_size for path in local.rglob("*") if path.is_file()
    )
