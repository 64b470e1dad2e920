"""What is tried again, how often, and what is not."""

import errno

import pytest

from burnish.trainer.restarts import Restarts, WrittenSince, failure_of
from burnish.utils.errors import (
    CheckpointError,
    ConfigError,
    MemoryExceededError,
    RewardError,
    StalledError,
    TrainingError,
    WorkerDiedError,
    WorkerError,
)


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def failure(error: BaseException, step: int = 3, stage: str = "update_actor"):
    return failure_of(error, step=step, stage=stage)


@pytest.mark.parametrize(
    ("error", "kind", "may_pass"),
    [
        (WorkerDiedError("rank 1 died"), "worker_death", True),
        (StalledError("no further"), "hang", True),
        (chained(WorkerError("rank 1 failed"), RuntimeError("CUDA error")), "error", True),
        (ConnectionResetError("by peer"), "error", True),
        (chained(WorkerError("rank 1 failed"), TrainingError("not finite")), "error", False),
        (TrainingError("no update in 4 steps"), "error", False),
        (chained(WorkerError("rank 0 failed"), MemoryExceededError("lower the batch")), "error", False),
        (chained(WorkerError("rank 0 failed"), OSError(errno.ENOSPC, "No space left")), "out_of_disk", False),
        (OSError(errno.EDQUOT, "Quota exceeded"), "out_of_disk", False),
        (CheckpointError("of another model"), "error", False),
        (RewardError("no score"), "error", False),
        (ConfigError("no such key"), "error", False),
        (ZeroDivisionError("a bug"), "error", False),
    ],
)
def test_what_may_pass_is_told_from_what_would_come_again(error, kind, may_pass):
    found = failure(error)
    assert (found.kind, found.may_pass) == (kind, may_pass)
    assert (Restarts(1).refusal(found) is None) == may_pass


def test_restarts_are_counted_and_the_same_failure_at_the_same_place_ends():
    restarts = Restarts(3)
    first = failure(WorkerDiedError("rank 1 died, pid 7"))
    assert restarts.refusal(first) is None
    restarts.take(first)
    assert "The same happened before in the same stage of step 3" in restarts.refusal(
        failure(WorkerDiedError("rank 0 died, pid 8"))
    )
    for other in (
        failure(WorkerDiedError("rank 1 died"), step=4),
        failure(StalledError("no further")),
    ):
        assert restarts.refusal(other) is None
        restarts.take(other)
    assert "as often as trainer.max_restarts=3 allows" in restarts.refusal(failure(StalledError("no further"), step=9))


def test_without_restarts_none_is_made():
    assert "trainer.max_restarts=0" in Restarts(0).refusal(failure(WorkerDiedError("rank 1 died")))


def test_a_checkpoint_that_was_there_before_is_not_one_of_this_run(tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert not WrittenSince(tmp_path)
    tracker.write_text("4")
    written = WrittenSince(tmp_path)
    assert not written
    other = tmp_path / "new"
    other.write_text("6")
    other.rename(tracker)
    assert written
