"""What a run writes into is its own while it lives, and nobody's afterwards, however it ended."""

import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from burnish.trainer.own_folders import OWNER, own_folders
from burnish.trainer.restarts import HEARTBEAT
from burnish.utils.errors import ConfigError

# Forks a process that outlives it, as readers of data may.
OTHER_RUN = """
import os, sys, time
from types import SimpleNamespace
from burnish.trainer.own_folders import own_folders
with own_folders(SimpleNamespace(trainer=SimpleNamespace(**eval(sys.argv[1])))):
    forked = os.fork()
    if not forked:
        time.sleep(600)
    print(forked, flush=True)
    time.sleep(600)
"""


def folders(**named) -> dict[str, str | None]:
    for folder in named.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {"rollout_data_dir": None, "validation_data_dir": None, **{key: str(path) for key, path in named.items()}}


def own(found: dict[str, str | None]):
    return own_folders(SimpleNamespace(trainer=SimpleNamespace(**found)))


@contextmanager
def another_run(found: dict[str, str | None]):
    """A process that has these folders until it is killed; what it has forked goes on in the block's second half."""
    run = subprocess.Popen([sys.executable, "-c", OTHER_RUN, repr(found)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    forked = int(run.stdout.readline())
    try:
        yield run
    finally:
        os.kill(forked, 9)
        run.kill()
        run.wait()
        run.stdout.close()


def test_two_runs_that_start_at_once_do_not_share_a_folder_and_a_killed_one_keeps_none(tmp_path):
    run_dir, kept = tmp_path / "run", tmp_path / "kept"
    ours = folders(default_local_dir=tmp_path / "ours", rollout_data_dir=kept)
    with another_run(folders(default_local_dir=run_dir, rollout_data_dir=kept)) as other:
        with pytest.raises(ConfigError, match=rf"default_local_dir=\S*run: another run is .* \(the one in {run_dir}\)"):
            own(folders(default_local_dir=run_dir)).__enter__()
        with pytest.raises(ConfigError, match=rf"rollout_data_dir=\S*kept: another run is .* \(the one in {run_dir}\)"):
            own(ours).__enter__()
        other.kill()
        other.wait()
        with own(ours), own(folders(default_local_dir=run_dir)):
            pass


def test_a_lock_that_a_machine_has_left_which_is_gone_keeps_nobody_out(tmp_path):
    found = folders(default_local_dir=tmp_path)
    with another_run(found):
        os.utime(tmp_path / OWNER, (1, 1))
        with own(found):
            pass
        (tmp_path / HEARTBEAT).write_text("{}")
        with pytest.raises(ConfigError, match="another run is writing there"):
            own(found).__enter__()


def test_where_there_are_no_locks_and_no_room_a_run_starts_all_the_same(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with own(folders(default_local_dir=tmp_path)), own(folders(default_local_dir=tmp_path)):
        pass
    (tmp_path / "none").mkdir()
    found = folders(default_local_dir=tmp_path / "none")
    (tmp_path / "none").rmdir()
    with own(found):
        pass
