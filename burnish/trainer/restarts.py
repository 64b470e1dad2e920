"""What ended an attempt at a run, and whether another one may help.

Workers that died, hung or failed are started again up to ``trainer.max_restarts`` times, from the last checkpoint. What training
itself did wrong is not tried again: numbers that are not finite, a disk that is full, a request that cannot be. Nor is what comes
back: the same kind of failure in the same stage of the same step.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from burnish.utils.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    ModelError,
    ResourceError,
    RewardError,
    StalledError,
    TrainingError,
    WorkerDiedError,
    WorkerError,
)

HEARTBEAT = "heartbeat.json"
"""The file in a run's folder that tells in which stage of which step it is."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_AGAIN = (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    ResourceError,
    RewardError,
    TrainingError,
)
"""Errors that would come again: the request, the data or the training is to blame."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended an attempt.

    Attributes:
        kind: "worker_death", "hang", "out_of_disk" or "error"; the first three are kinds of events.
        what: tells failures of one kind apart, as the name of an exception.
        may_pass: whether another attempt may go well.
    """

    kind: str
    what: str
    step: int
    stage: str
    message: str
    may_pass: bool

    @property
    def place(self) -> tuple[str, str, int, str]:
        """Two failures with the same one are the same failure."""
        return self.kind, self.what, self.step, self.stage


def failure_of(error: BaseException, *, step: int, stage: str) -> Failure:
    """What ``error`` says of an attempt that it ended in a stage of a step."""
    chain = list(causes(error))
    known = WorkerError | OSError
    kind, may_pass = "error", isinstance(error, known)
    if any(is_disk_full(cause) for cause in chain):
        kind, may_pass = "out_of_disk", False
    elif any(isinstance(cause, WorkerDiedError) for cause in chain):
        kind = "worker_death"
    elif any(isinstance(cause, StalledError) for cause in chain):
        kind = "hang"
    may_pass = may_pass and not any(isinstance(cause, _NOT_AGAIN) for cause in chain)
    message = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return Failure(kind=kind, what=type(chain[-1]).__name__, step=step, stage=stage, message=message, may_pass=may_pass)


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not be written since there is no room."""
    return isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what each was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class Restarts:
    """Counts the attempts of a run.

    Args:
        allowed: ``trainer.max_restarts``.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.taken = 0
        self._seen: set[tuple[str, str, int, str]] = set()

    def refusal(self, failure: Failure) -> str | None:
        """Why the run is not started again, in a sentence; None where it is."""
        if self.allowed == 0:
            return "Workers are not restarted (trainer.max_restarts=0)."
        if not failure.may_pass:
            return "It is not started again, since that would end the same way."
        if failure.place in self._seen:
            return f"The same happened before in the same stage of step {failure.step}, so it is not started again."
        if self.taken >= self.allowed:
            return f"It was started again {self.taken} times, as often as trainer.max_restarts={self.allowed} allows."
        return None

    def take(self, failure: Failure) -> None:
        """The run is started again after ``failure``."""
        self._seen.add(failure.place)
        self.taken += 1


class WrittenSince:
    """Whether the run has written a checkpoint since this object was made: then it goes on from there, whatever its
    ``trainer.resume_mode`` said at first."""

    def __init__(self, run_dir: Path) -> None:
        self._tracker = run_dir / "latest_checkpointed_iteration.txt"
        self._before = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._tracker)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def __bool__(self) -> bool:
        return self._stamp() != self._before
