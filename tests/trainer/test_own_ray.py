"""The processes of the Ray that a run starts for itself."""

import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from burnish.trainer.own_ray import OwnRay
from burnish.trainer.watch import RunWatch
from burnish.utils.events import EventLog, read_events

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


def started(name, tmp_path):
    """A process that Ray might have started, by the name of its program."""
    program = tmp_path / name
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-c", _SLEEPS], stdout=subprocess.PIPE, process_group=0)
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
