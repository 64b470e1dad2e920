"""A small process starts the training again where its process died, passes signals on, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.trainer import supervisor
from burnish.utils.events import read_events

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Orphans are adopted on Linux only.")

SUPERVISOR = """
import sys
from types import SimpleNamespace
from burnish.trainer import supervisor
supervisor._START = sys.argv[2]
supervisor._SECONDS_BEFORE_A_RESTART = 0.0
supervisor._SECONDS_TO_LEAVE = 0.5
trainer = SimpleNamespace(default_local_dir=sys.argv[1], max_restarts=3, stage_timeout=None)
from burnish.trainer.ending import exit_status
sys.exit(exit_status(lambda: supervisor.supervise(["key=value"], SimpleNamespace(trainer=trainer))))
"""

# The training's side: argv is the supervisor's path, then the overrides.
CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
sys.path[:] = json.loads(sys.argv.pop(1))
from burnish.trainer.restarts import failure_of
from burnish.trainer.supervised import follow_supervisor, in_supervision, report_failure
from burnish.utils.errors import StalledError, TrainingError
assert in_supervision()
follow_supervisor()
folder = Path({folder!r})
attempt = len(list(folder.glob("attempt-*")))
(folder / f"attempt-{{attempt}}").write_text(json.dumps(sys.argv[1:]))
def beat(step, stage):
    said = dict(time=time.time(), pid=os.getpid(), step=step, stage=stage)
    (folder / "new").write_text(json.dumps(said))
    (folder / "new").rename(folder / "heartbeat.json")
{what}
"""


@pytest.fixture
def start(tmp_path):
    processes = []

    def start(what: str) -> subprocess.Popen:
        child = CHILD.format(folder=str(tmp_path), what=what)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, str(tmp_path), child],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def attempts(folder: Path) -> list[list[str]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("attempt-*"))]


def wait_for(file: Path) -> str:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return file.read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_training_starts_again_from_its_checkpoint_and_what_it_left_is_ended(start, tmp_path):
    run = start(
        """
if attempt == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "orphan").write_text(str(child.pid))
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    beat(3, "update_actor")
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0)
"""
    )
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0, out
    assert attempts(tmp_path) == [["key=value"], ["key=value", "trainer.resume_mode=auto"]]
    assert "The driver's process was ended by SIGKILL" in out
    assert "Starting again (1 of 3)." in out
    assert not is_alive(int((tmp_path / "orphan").read_text()))
    death, restart = read_events(tmp_path)
    assert (death["kind"], death["step"], death["stage"]) == ("worker_death", 3, "update_actor")
    assert restart["kind"] == "restart"


def test_what_happens_twice_at_the_same_place_or_would_happen_again_ends(start, tmp_path):
    run = start('beat(3, "gen"); os.kill(os.getpid(), signal.SIGSEGV)')
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert len(attempts(tmp_path)) == 2
    assert "SIGSEGV" in out
    assert "The same happened before in the same stage of step 3" in out
    run = start(
        """
report_failure(failure_of(TrainingError("no update in 4 steps"), step=7, stage="update_actor"))
sys.exit(1)
"""
    )
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert len(attempts(tmp_path)) == 3
    assert "It is not started again" in out


def test_a_failure_that_may_pass_is_tried_again_and_a_wrong_request_is_not(start, tmp_path):
    run = start(
        """
if attempt == 0:
    report_failure(failure_of(StalledError("no further"), step=7, stage="gen"))
    sys.exit(1)
sys.exit(2)
"""
    )
    run.communicate(timeout=60)
    assert run.returncode == 2
    assert len(attempts(tmp_path)) == 2


def test_a_failure_with_a_very_long_message_does_not_wait_for_its_reader(start, tmp_path):
    run = start(
        """
if attempt == 0:
    report_failure(failure_of(StalledError("\\U0001f525" * 100_000), step=7, stage="gen"))
    sys.exit(1)
sys.exit(2)
"""
    )
    run.communicate(timeout=60)
    assert run.returncode == 2
    assert len(attempts(tmp_path)) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_training_once_and_its_status_is_that_of_the_run(start, tmp_path, number):
    run = start(
        f"""
got = []
signal.signal({int(number)}, lambda *_: got.append(1))
(folder / "ready").touch()
while not got:
    time.sleep(0.02)
time.sleep(0.5)
sys.exit({128 + number} if got == [1] else 1)
"""
    )
    wait_for(tmp_path / "ready")
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert len(attempts(tmp_path)) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_ends_a_training_which_is_still_loading_is_no_failure(start, tmp_path, number, status):
    run = start('(folder / "ready").touch(); time.sleep(60)')
    wait_for(tmp_path / "ready")
    run.send_signal(number)
    out, _ = run.communicate(timeout=60)
    assert (run.returncode, out) == (status, "Stopped before training began.\n")
    assert list(read_events(tmp_path)) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_between_two_attempts_ends_the_run_with_its_status(start, tmp_path, number, status):
    # The signal finds no process to pass it to any more.
    run = start(
        """
os.kill(os.getppid(), signal.SIGSTOP)
report_failure(failure_of(StalledError("no further"), step=7, stage="gen"))
(folder / "pid").write_text(str(os.getpid()))
os._exit(1)
"""
    )
    pid = int(wait_for(tmp_path / "pid"))
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(number)
    run.send_signal(signal.SIGCONT)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == status, out
    assert len(attempts(tmp_path)) == 1


def test_the_training_ends_with_its_supervisor(start, tmp_path):
    run = start(
        '(folder / "new").write_text(str(os.getpid())); (folder / "new").rename(folder / "pid"); time.sleep(600)'
    )
    pid = int(wait_for(tmp_path / "pid"))
    run.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Clock:
    """Time that goes on while somebody sleeps; a training that runs for an hour of it."""

    def __init__(self, beat) -> None:
        self.now, self.pid, self._beat = 0.0, 7, beat

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._beat(self.now)

    def poll(self) -> int | None:
        return 0 if self.now > 400 else None


@pytest.mark.parametrize("is_alive", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_training_whose_heartbeat_finds_no_room_on_the_disk_is_not_taken_for_silent(tmp_path, monkeypatch, is_alive):
    file, ended = tmp_path / "heartbeat.json", []
    file.write_text(json.dumps({"time": 0.0, "pid": 7, "stage": "gen"}))
    clock = Clock(lambda now: os.utime(file, (now, now)) if is_alive else None)
    monkeypatch.setattr(supervisor, "time", clock)
    trainer = SimpleNamespace(default_local_dir=str(tmp_path), max_restarts=3, stage_timeout=60.0)
    watching = supervisor.Supervisor([], SimpleNamespace(trainer=trainer))
    monkeypatch.setattr(watching, "_end_silent", lambda child: ended.append(clock.now) or setattr(clock, "now", 4000))
    watching._wait(clock)
    assert bool(ended) != is_alive


def test_a_process_without_supervisor_knows_it(monkeypatch):
    from burnish.trainer.supervised import VARIABLE, in_supervision

    assert not in_supervision()
    monkeypatch.setenv(VARIABLE, f"{os.getpid()}:3")  # Inherited from a parent that is not ours.
    assert not in_supervision()
