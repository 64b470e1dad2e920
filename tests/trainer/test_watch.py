"""A run's heartbeat is written, what stands still is told, and what does not come back is ended."""

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.single_controller.heartbeat import Pulse
from burnish.trainer.watch import RunWatch
from burnish.utils import progress
from burnish.utils.errors import StalledError
from burnish.utils.events import EventLog, read_events


class FakeGroup:
    """A group of one process, this one, that never gets further."""

    def __init__(self) -> None:
        self.pulse = Pulse("node-7")

    def beats(self):
        return {"actor rank 0": self.pulse.beat()}

    def idle_seconds(self):
        return None

    def dump_stacks(self):
        return {}


@pytest.fixture
def trainer():
    return SimpleNamespace(
        current_stage="gen", global_steps=4, total_training_steps=9, worker_groups={"actor": FakeGroup()}
    )


def watch(trainer, folder: Path, timeout: float | None = None) -> RunWatch:
    return RunWatch(trainer, folder, EventLog(folder), timeout)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def heartbeat(folder: Path) -> dict:
    file = folder / "heartbeat.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_the_heartbeat_tells_step_stage_and_workers(trainer, tmp_path):
    with watch(trainer, tmp_path), trainer.worker_groups["actor"].pulse.stage("update_actor"):
        trainer.current_stage = "update_actor"
        wait_for(lambda: heartbeat(tmp_path).get("stage") == "update_actor")
        said = heartbeat(tmp_path)
        assert (said["step"], said["total_steps"], said["pid"]) == (4, 9, os.getpid())
        worker = said["workers"]["actor rank 0"]
        assert (worker["stage"], worker["node"], worker["pid"]) == ("update_actor", "node-7", os.getpid())
        assert worker["since"] <= said["time"]
    assert heartbeat(tmp_path)["stage"] == "ended"
    assert not list(tmp_path.glob("*.tmp"))


def test_on_a_full_disk_the_time_of_the_heartbeats_file_tells_that_the_run_lives(trainer, tmp_path, monkeypatch):
    running = watch(trainer, tmp_path)
    running._write_heartbeat()
    os.utime(tmp_path / "heartbeat.json", (1, 1))

    def write_text(*args, **keys):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    trainer.current_stage = "update_actor"
    running._write_heartbeat()
    assert heartbeat(tmp_path)["stage"] == "gen"
    assert (tmp_path / "heartbeat.json").stat().st_mtime > 1


def waits_for_something(seconds: float) -> None:
    time.sleep(seconds)


def test_what_stands_still_is_told_first_and_then_interrupted_with_its_place(trainer, tmp_path):
    with pytest.raises(StalledError) as caught, watch(trainer, tmp_path, timeout=0.6):
        waits_for_something(600)
    message = str(caught.value)
    assert "The driver got no further in stage gen of step 4 for 0.6 s (trainer.stage_timeout). It stands at" in message
    assert "in waits_for_something" in message
    (warning,) = [event for event in read_events(tmp_path) if event["kind"] == "warning"]
    assert warning["stage"] == "gen"
    files = list((tmp_path / "stacks").iterdir())
    assert files
    assert all(str(file) in message + warning["message"] for file in files)
    assert all("waits_for_something" in file.read_text() for file in files)


def test_ticks_keep_a_stage_alive_and_a_new_stage_begins_anew(trainer, tmp_path, monkeypatch):
    idle = [0.0]
    monkeypatch.setattr(progress, "idle_seconds", lambda: idle[0])
    looked = threading.Event()
    with watch(trainer, tmp_path, timeout=0.4) as it:
        # Long after the limit, since pieces of work come in.
        wait_for(lambda: time.monotonic() - it._moved > 1.5)
        idle[0] = 600.0
        trainer.current_stage = "adv"
        wait_for(lambda: it._place == (4, "adv"))
        looked.set()
    assert not [event for event in read_events(tmp_path) if event["kind"] == "hang"]


def test_without_a_limit_it_warns_and_ends_nothing(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.trainer.watch._WARNS_AFTER", 0.2)
    with watch(trainer, tmp_path):
        wait_for(lambda: any(event["kind"] == "warning" for event in read_events(tmp_path)))


def test_a_run_in_another_thread_is_not_interrupted(trainer, tmp_path):
    ended = []

    def run() -> None:
        with watch(trainer, tmp_path, timeout=0.2):
            time.sleep(1.5)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert ended


def test_a_hang_that_no_exception_reaches_is_told_to_the_supervisor_too(trainer, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("burnish.trainer.watch.report_failure", told.append)
    monkeypatch.setattr("burnish.trainer.watch.stacks.descendants", lambda pid: iter(()))
    monkeypatch.setattr("burnish.trainer.watch.os._exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    with pytest.raises(SystemExit):
        watch(trainer, tmp_path, timeout=600)._give_up()
    (failure,) = told
    assert (failure.kind, failure.step, failure.stage, failure.may_pass) == ("hang", 4, "gen", True)
    assert "does not answer" in failure.message
