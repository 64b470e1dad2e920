"""The processes of the Ray that a run starts for itself."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.trainer.ending import exit_status
from burnish.trainer.own_ray import OwnRay
from burnish.trainer.restarts import failure_of
from burnish.trainer.watch import RunWatch
from burnish.utils.errors import WorkerDiedError
from burnish.utils.events import EventLog, read_events
from tests.e2e.runs import REPO

_SLEEPS = "import time; print(flush=True); time.sleep(600)"
_SESSION = """
import os, subprocess, sys
from ray._private import services
from burnish.trainer.own_ray import OwnRay

own = OwnRay()
with own.starting():
    process = services.ConsolePopen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, preexec_fn=lambda: None)
process.stdout.readline()
print(process.pid, os.getpgid(process.pid), os.getpgrp(), services.ConsolePopen.__name__, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own():
    own = OwnRay()
    yield own
    own.close()


def started(name, tmp_path, *arguments):
    """A process that Ray might have started, by the name of its program."""
    program = tmp_path / name
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-c", _SLEEPS, *arguments], stdout=subprocess.PIPE, process_group=0)
    process.stdout.readline()
    return process


def test_signals_for_the_run_pass_rays_processes_by_and_its_death_does_not():
    driver = subprocess.Popen(
        [sys.executable, "-c", _SESSION, _SLEEPS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, group, group_of_run, restored = driver.stdout.readline().split()
    assert (group == pid, group != group_of_run, restored) == (True, True, "ConsolePopen")
    driver.kill()
    driver.communicate()
    assert ends(int(pid))


def ends(pid):
    """Waits until the process is gone, or a zombie that nobody has taken note of."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def test_what_is_left_of_it_ends_with_it(own, tmp_path):
    process = started("raylet", tmp_path)
    own.take(process)
    own.close()
    assert process.wait(60) == -signal.SIGKILL


def test_its_head_is_missed_until_it_is_meant_to_end(own, tmp_path):
    raylet, head = started("raylet", tmp_path), started("gcs_server", tmp_path)
    for process in (raylet, head):
        own.take(process)
    raylet.kill()
    raylet.wait()
    assert own.lost() is None
    head.terminate()
    head.wait()
    assert f"gcs_server ({head.pid}), without which no worker can be reached, was ended by SIGTERM" in own.lost()
    own.ending()
    assert own.lost() is None


@pytest.fixture
def sessions(tmp_path):
    """Folders of two sessions, as Ray leaves them, and its link to the one that began last."""
    ours, others = tmp_path / "session_1", tmp_path / "session_2"
    for folder in (ours, others):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "raylet.out").touch()
    return ours, others, tmp_path / "session_latest"


@pytest.mark.parametrize("latest", [0, 1])
def test_the_folder_of_the_runs_session_is_removed_and_nobody_elses(own, tmp_path, sessions, latest):
    ours, others, link = sessions
    link.symlink_to(sessions[latest])
    own.take(started("gcs_server", tmp_path))
    own.has_session(str(ours))
    assert own.logs == f"The logs of the run's Ray are kept in {ours / 'logs'}."
    own.close()
    own.remove_session()
    assert not ours.exists()
    assert (others / "logs" / "raylet.out").exists()
    assert link.is_symlink() == link.exists() == (latest == 1)
    own.remove_session()


def test_the_session_of_a_cluster_that_was_joined_stays(own, sessions):
    ours, *_ = sessions
    own.join("head:1")
    own.has_session(str(ours))
    assert own.logs is None
    own.remove_session()
    assert (ours / "logs" / "raylet.out").exists()


def test_the_death_of_the_head_is_told_with_the_place_of_its_logs(own, tmp_path, sessions):
    head = started("gcs_server", tmp_path, f"--session-dir={sessions[0]}")
    own.take(head)
    head.kill()
    head.wait()
    assert own.lost().endswith(f"The logs of the run's Ray are kept in {sessions[0] / 'logs'}.")


def test_what_is_noted_of_an_error_is_said_with_it(capsys):
    error = WorkerDiedError("rank 0 died.")
    error.add_note("The logs are there.")

    def fails() -> int:
        raise error

    assert exit_status(fails) == 1
    assert capsys.readouterr().err == "WorkerDiedError: rank 0 died. The logs are there.\n"
    assert failure_of(error, step=1, stage="gen").message == "rank 0 died. The logs are there."


# In a process of its own: Ray's functions and classes are of one session.
_TWO_SESSIONS = """
import sys
from pathlib import Path
from burnish.trainer.cluster import cluster
from burnish.trainer.own_ray import OwnRay
from tests.e2e.runs import tiny_config

config = tiny_config(Path(sys.argv[1]) / "run", "trainer.controller=ray", f"ray_kwargs.ray_init._temp_dir={sys.argv[1]}",
                     "ray_kwargs.ray_init.num_cpus=1", "ray_kwargs.ray_init.address=local")
with cluster(config):
    (own,) = Path(sys.argv[1]).glob("session_*-*")
print(own.exists(), flush=True)

def interrupt(self, folder):
    raise KeyboardInterrupt

has_session, OwnRay.has_session = OwnRay.has_session, interrupt
try:
    with cluster(config):
        pass
except KeyboardInterrupt:
    print(list(Path(sys.argv[1]).glob("session_*-*")), flush=True)
OwnRay.has_session = has_session
try:
    with cluster(config):
        raise RuntimeError("by the run")
except RuntimeError as error:
    (own,) = Path(sys.argv[1]).glob("session_*-*")
    print(own / "logs", *error.__notes__, sep="|", flush=True)
"""


@pytest.mark.slow
def test_rays_own_folder_goes_with_a_run_that_ends_well_and_stays_after_an_error():
    # Short: the names of Ray's sockets must fit into a hundred characters.
    folder = tempfile.mkdtemp(prefix="b", dir="/tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TWO_SESSIONS, folder],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        is_there, left_when_interrupted, kept = done.stdout.splitlines()
        logs, note = kept.split("|")
        assert (is_there, left_when_interrupted) == ("False", "[]")
        assert note == f"The logs of the run's Ray are kept in {logs}."
        assert list(Path(logs).glob("gcs_server*"))
    finally:
        shutil.rmtree(folder)


def test_the_head_of_a_cluster_that_was_joined_is_given_up_when_it_is_silent_for_long(own, monkeypatch):
    now, said = [100.0], {"head:1": None}
    monkeypatch.setattr("burnish.trainer.own_ray.time.monotonic", lambda: now[0])
    monkeypatch.setattr("burnish.trainer.own_ray.silence_of", said.get)
    assert not own.has_head
    own.join("head:1")
    assert own.has_head

    def after(seconds):
        now[0] += seconds
        return own.lost()

    assert after(1000) is None
    said["head:1"] = "Connection refused"
    assert after(40) is None
    said["head:1"] = None
    assert after(5) is None
    said["head:1"] = "Connection refused"
    assert after(49) is None
    assert after(1) is None  # Asked a moment ago.
    assert after(1) == "The head of the Ray cluster at head:1 has not answered for 51 s (Connection refused)."
    own.ending()
    assert after(100) is None


def test_a_run_whose_ray_is_gone_is_ended_with_a_sentence(own, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("burnish.trainer.watch.report_failure", told.append)
    monkeypatch.setattr("burnish.trainer.watch.stacks.descendants", lambda pid: iter(()))

    monkeypatch.setattr("burnish.trainer.watch.os._exit", sys.exit)
    trainer = SimpleNamespace(current_stage="gen", global_steps=4, total_training_steps=9, worker_groups={})
    watch = RunWatch(trainer, tmp_path, EventLog(tmp_path), None)
    with pytest.raises(SystemExit, match="1"):
        watch._watch_ray(SimpleNamespace(lost=lambda: "Ray is gone."))
    (failure,) = told
    assert (failure.kind, failure.step, failure.stage, failure.may_pass) == ("worker_death", 4, "gen", True)
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["message"]) == (
        "worker_death",
        "Ray is gone. The run is ended in stage gen of step 4.",
    )
