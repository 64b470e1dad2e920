"""A run whose worker fails goes on from its last checkpoint by itself; one that trains itself into the ground does not."""

import errno
import json

import pytest

from burnish.trainer.ending import exit_status
from burnish.trainer.loop import TrainingLoop
from burnish.utils.errors import TrainingError, WorkerError
from burnish.utils.events import read_events
from tests.e2e import failing_loss, poisoned_loss
from tests.e2e.runs import logged, tiny_run

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
FAILING = (f"{LOSS}=tests.e2e.failing_loss:failing", "trainer.save_freq=1", "trainer.resume_mode=disable")


@pytest.fixture
def fails(monkeypatch):
    """What is raised in which update."""
    monkeypatch.setattr("burnish.trainer.run._SECONDS_BEFORE_A_RESTART", 0.0)
    monkeypatch.setattr(failing_loss, "FAILS", {})
    monkeypatch.setattr(failing_loss, "UPDATES", [])
    return failing_loss.FAILS


def kinds(folder) -> list[str]:
    return [event["kind"] for event in read_events(folder)]


def test_a_failed_worker_is_started_again_and_the_run_ends_as_if_nothing_had_happened(tmp_path, fails):
    tiny_run(tmp_path / "one", *FAILING)
    assert len(failing_loss.UPDATES) == 3
    # The second run's second step, which is then repeated, and its third.
    fails |= {
        5: RuntimeError("CUDA error: an illegal memory access was encountered"),
        7: ConnectionResetError("by peer"),
    }
    summary = tiny_run(tmp_path / "two", *FAILING, "trainer.max_restarts=2")
    assert summary.status == 0
    assert logged(tmp_path / "one") == logged(tmp_path / "two")
    assert kinds(tmp_path / "two").count("restart") == 2
    assert kinds(tmp_path / "two").count("resume") == 2
    weights = [(tmp_path / name / "global_step_3/actor/model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    said = json.loads((tmp_path / "two" / "heartbeat.json").read_text())
    assert (said["step"], said["total_steps"], said["stage"]) == (3, 3, "ended")
    assert kinds(tmp_path / "two")[-1] == "end"


@pytest.mark.slow
def test_the_same_failure_at_the_same_step_ends_the_run(tmp_path, fails):
    fails |= {number: RuntimeError("CUDA error") for number in range(3, 20)}
    with pytest.raises(WorkerError, match="CUDA error"):
        tiny_run(tmp_path, *FAILING, "trainer.max_restarts=5")
    assert kinds(tmp_path).count("restart") == 1
    assert kinds(tmp_path)[-1] == "end"


def test_numbers_that_are_not_finite_are_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(poisoned_loss, "UPDATES", [])
    monkeypatch.setattr(poisoned_loss, "POISONED", set(range(1, 100)))
    overrides = (f"{LOSS}=tests.e2e.poisoned_loss:poisoned", "trainer.max_skipped_updates=1", "trainer.max_restarts=5")
    with pytest.raises(TrainingError):
        tiny_run(tmp_path, *overrides)
    assert "restart" not in kinds(tmp_path)
    (end,) = [event for event in read_events(tmp_path) if event["kind"] == "end"]
    assert (end["status"], end["error"]) == (1, "TrainingError")


def test_who_interrupts_the_shutdown_of_a_run_that_has_ended_gets_what_it_ended_with(tmp_path, monkeypatch):
    shutdown = TrainingLoop.shutdown

    def interrupted(trainer: TrainingLoop) -> None:
        shutdown(trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLoop, "shutdown", interrupted)
    summary = tiny_run(tmp_path, "trainer.total_training_steps=1")
    assert (summary.status, summary.ending) == (0, "Finished after step 1.")


def test_a_full_disk_is_a_sentence(capsys):
    def fails_to_write() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/run/metrics.jsonl")

    assert exit_status(fails_to_write) == 1
    said = capsys.readouterr().err
    assert "/data/run/metrics.jsonl" in said
    assert "no room" in said
