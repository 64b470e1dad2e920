"""One run's checkpoints: written under a temporary name and renamed when complete, found, and removed when there are newer ones.

A run that dies while it saves leaves every checkpoint before as it was.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from burnish.config import TrainerConfig
from burnish.trainer.ppo.checkpoints.folders import BEST, RunFolder, TrackerError
from burnish.trainer.ppo.checkpoints.manifest import MANIFEST, Manifest, problem_of, read_manifest, write_manifest
from burnish.trainer.ppo.checkpoints.remote import Uploads
from burnish.utils import local_paths, storage
from burnish.utils.durable import sync_tree
from burnish.utils.errors import CheckpointError, DiskError
from burnish.utils.machine import free_bytes

logger = logging.getLogger("burnish.trainer")

# Beside the checkpoint itself: metrics, events and rollouts go on while it is written.
_SPARE_BYTES = 2**24
MIB = 2**20

Written = Callable[[bool], bool]
"""Whether a part has nothing left to write; True as argument waits for it. Raises `CheckpointError` where it failed."""


@dataclass
class Pending:
    """A checkpoint that has not got its name yet.

    Attributes:
        parts: those that may still be written in the background.
        must_succeed: whether its failure ends the run whatever ``trainer.on_save_error`` says.
    """

    step: int
    folder: Path
    world_size: int
    metrics: dict[str, float]
    must_succeed: bool
    started: float
    parts: list[Written] = field(default_factory=list)


class CheckpointManager:
    """Writes, keeps and removes the checkpoints of one run.

    Args:
        config: the ``trainer`` section.
        tell: called with kind, message and step of an event (`burnish.utils.events.EventLog.write`).
        estimate: bytes of the first checkpoint, before one has been written; None is not known.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        tell: Callable[..., Any] | None = None,
        estimate: Callable[[], int | None] | None = None,
    ) -> None:
        self.config = config
        self.root = local_paths.expanded(config.default_local_dir).absolute()
        self.folder = RunFolder(self.root)
        self.pending: Pending | None = None
        self.saved_step: int | None = None
        """The newest step that is complete on the disk, written or resumed from by this object."""
        self.saved_in = 0.0
        self.num_failed = 0
        self.best: float | None = None
        self._tell = tell or (lambda *args, **kwargs: None)
        self._estimate = estimate
        self._resumed_after: int | None = None
        self._retry_at: int | None = None
        self._retry_wait = 1
        url = config.default_hdfs_dir
        self.uploads = None if url is None else Uploads(url, self._tell)

    # ------------------------------------------------------------------------------------------------ when

    def is_due(self, step: int) -> bool:
        """Whether ``trainer.save_freq``, or a save that failed, asks for one at ``step``."""
        freq = self.config.save_freq
        return freq > 0 and (step % freq == 0 or (self._retry_at is not None and step >= self._retry_at))

    def is_better(self, metrics: dict[str, float]) -> bool:
        """Whether the validation in ``metrics`` is better than that of every checkpoint."""
        name = self.config.keep_best
        value = None if name is None else metrics.get(name)
        if value is None or value != value:
            return False
        return self.best is None or (value > self.best if self.config.keep_best_mode == "max" else value < self.best)

    # ----------------------------------------------------------------------------------------------- write

    def save(
        self,
        step: int,
        write: Callable[[Path], list[Written]],
        *,
        world_size: int = 1,
        metrics: dict[str, float] | None = None,
        must_succeed: bool = False,
    ) -> None:
        """Has checkpoint ``step`` written into a new folder; `settle` gives it its name.

        Args:
            write: writes into the folder it is given, and returns what may still be at work in the background.
            metrics: of the validation at that step, for ``trainer.keep_best``.
            must_succeed: a failure ends the run whatever ``trainer.on_save_error`` says.

        Raises:
            CheckpointError: the model is not finite; or the disk does not take it and the run is not to go on without.
        """
        self.settle(wait=True)
        chosen = self.config.keep_best
        kept = {name: float(value) for name, value in (metrics or {}).items() if name == chosen}
        pending = Pending(step, self.root / f"tmp_global_step_{step}", world_size, kept, must_succeed, time.monotonic())
        try:
            # First what runs that died have left: it may be what fills the disk.
            self.folder.temporary(step)
            self._check_space()
            pending.parts = write(pending.folder)
        except BaseException as error:
            shutil.rmtree(pending.folder, ignore_errors=True)
            if not isinstance(error, CheckpointError | OSError):
                raise
            self._failed(pending, error)
            return
        self.pending = pending

    def settle(self, *, wait: bool = False) -> None:
        """Gives the pending checkpoint its name if all of it is written.

        Args:
            wait: until it is.

        Raises:
            CheckpointError: as of `save`.
        """
        pending = self.pending
        if pending is None:
            return
        try:
            # All are asked: the next save begins when nobody writes any more.
            answers = _all_answers(pending.parts, wait=wait)
            if not all(answers):
                return
            self.pending = None
            self._complete(pending)
        except (CheckpointError, OSError) as error:
            self.pending = None
            with contextlib.suppress(CheckpointError):
                _all_answers(pending.parts, wait=True)
            shutil.rmtree(pending.folder, ignore_errors=True)
            self._failed(pending, error)

    def _complete(self, pending: Pending) -> None:
        step = pending.step
        sync_tree(pending.folder)
        write_manifest(
            pending.folder,
            Manifest(step=step, world_size=pending.world_size, run=self.folder.run, metrics=pending.metrics),
        )
        final = self.folder.give_name(pending.folder, step)
        self.saved_step, self.saved_in = step, time.monotonic() - pending.started
        self._retry_at, self._retry_wait = None, 1
        size = read_manifest(final).num_bytes
        self._tell(
            "checkpoint",
            f"Saved {final.name} ({size / MIB:,.1f} MiB) in {self.saved_in:.1f} s.",
            step=step,
            bytes=size,
            seconds=round(self.saved_in, 3),
            path=str(final),
        )
        self._leave_other_course(step)
        self._prune(step, self._choose_best())
        if self.uploads is not None:
            self.uploads.add(final)

    def _leave_other_course(self, step: int) -> None:
        """With the first checkpoint since it was resumed, the run has left those beyond where it went on."""
        if self._resumed_after is None:
            return
        try:
            self.folder.leave(after=self._resumed_after, but=step)
        except OSError as error:
            logger.warning("Old checkpoints could not be marked as left; trainer.keep_best may choose one: %s.", error)
            return
        self._resumed_after = None

    def _choose_best(self) -> int | None:
        if self.config.keep_best is None:
            return None
        try:
            chosen = self.folder.choose_best(self.config.keep_best, self.config.keep_best_mode, self._resumed_after)
        except OSError as error:
            # The checkpoints themselves are there; the next one writes it again.
            logger.warning("%s could not be written: %s.", self.root / BEST, error)
            return None
        step, self.best = chosen or (None, None)
        return step

    def _prune(self, step: int, best: int | None) -> None:
        spare = set() if self.uploads is None else self.uploads.steps()
        removed = self.folder.prune(
            self.config.max_actor_ckpt_to_keep or None,
            self.config.max_critic_ckpt_to_keep or None,
            step,
            spare if best is None else spare | {best},
        )
        if removed:
            self._tell(
                "checkpoint_removed", f"Removed {', '.join(removed)}: there are newer ones.", step=step, paths=removed
            )

    def note_resumed(self, folder: Path, step: int) -> None:
        """The run goes on from ``folder``, after ``step``."""
        if folder.parent == self.root:
            self.saved_step = self._resumed_after = step
        self._choose_best()

    def note_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Adds to the checkpoint of ``step``, if there is one, what a later validation of it gave."""
        name, folder = self.config.keep_best, self.folder.path(step)
        if name in metrics and problem_of(folder) is None and (folder / MANIFEST).exists():
            write_manifest(folder, replace(read_manifest(folder), metrics={name: float(metrics[name])}))
            self._choose_best()

    def finish(self) -> None:
        """Waits for what is written or copied in the background.

        Raises:
            CheckpointError: as of `save`.
        """
        self.settle(wait=True)
        if self.uploads is not None:
            self.uploads.finish()
            if self.saved_step is not None and self._resumed_after is None:
                # What still waited for its copy when this run saved newer ones.
                self._prune(self.saved_step, self._choose_best())

    # ------------------------------------------------------------------------------------------------ fail

    def _check_space(self) -> None:
        expected, free = self._expected_bytes(), free_bytes(str(self.root))
        if expected is None or free is None or free >= expected + _SPARE_BYTES:
            return
        raise DiskError(
            f"There is no room for a checkpoint in {self.root}: one takes about {expected / MIB:,.1f} MiB and "
            f"leaves {_SPARE_BYTES / MIB:,.0f} MiB to others, and {free / MIB:,.1f} MiB are free. Make "
            f"room, keep fewer of them (trainer.max_actor_ckpt_to_keep), or save to another disk (trainer.default_local_dir)."
        )

    def _expected_bytes(self) -> int | None:
        complete, _ = self.folder.complete()
        if complete:
            # The last one's size: contents and optimizer of a run stay the same.
            return read_manifest(complete[max(complete)]).num_bytes
        return None if self._estimate is None else self._estimate()

    def _failed(self, pending: Pending, error: CheckpointError | OSError) -> None:
        """Tells, and raises unless the run goes on without this checkpoint."""
        step = pending.step
        is_full = isinstance(error, DiskError) or (
            isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        )
        # A model that is not finite is no matter of the disk: training it further is of no use.
        of_disk = isinstance(error, DiskError | OSError)
        sentence = (
            str(error) if isinstance(error, CheckpointError) else f"{pending.folder} could not be written: {error}."
        )
        if not of_disk:
            raise error
        self.num_failed += 1
        said = f"Step {step} was not saved: {sentence}"
        if isinstance(error, TrackerError):
            said = f"{error.strerror}."
        self._tell("out_of_disk" if is_full else "warning", said, step=step)
        if pending.must_succeed or self.config.on_save_error == "raise":
            raise DiskError(said) from error
        self._retry_at = step + self._retry_wait
        logger.warning(
            "%s Training goes on (trainer.on_save_error=warn); the next attempt is at step %d.", said, self._retry_at
        )
        # Soon at first; later no more often than a run with such a disk can bear.
        self._retry_wait = min(2 * self._retry_wait, max(1, self.config.save_freq))

    def metrics(self) -> dict[str, float]:
        """Numbers of what went wrong so far, for the log; nothing where nothing did."""
        counts = {
            "checkpoint/failed_saves": self.num_failed,
            "checkpoint/failed_uploads": 0 if self.uploads is None else self.uploads.num_failed,
        }
        return {name: float(count) for name, count in counts.items() if count}

    def described(self) -> str:
        """Where the checkpoints are, for a sentence."""
        url = self.config.default_hdfs_dir
        return str(self.root) if url is None else f"{self.root} and {storage.shown(url)}"


def _all_answers(parts: list[Written], *, wait: bool) -> list[bool]:
    answers, first = [], None
    for written in parts:
        try:
            answers.append(written(wait))
        except CheckpointError as error:
            first = first or error
    if first is not None:
        raise first
    return answers
