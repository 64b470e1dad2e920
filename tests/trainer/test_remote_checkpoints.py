"""Checkpoints at a URL: whole or not at all, never in the way of training, and found by a run on another machine."""

import multiprocessing
import os
import shutil
import signal
import threading

import fsspec
import pytest

from burnish.trainer.ppo.checkpoints import problem_of
from burnish.trainer.ppo.checkpoints import remote as remote_module
from burnish.trainer.ppo.checkpoints.folders import TRACKER
from burnish.trainer.ppo.checkpoints.remote import Uploads, is_copied, newest_remote
from burnish.trainer.ppo.checkpoints.resume import find
from burnish.utils import storage
from burnish.utils.errors import CheckpointError, StorageError
from burnish.utils.storage import folders as storage_folders
from tests.trainer.test_checkpoints import Told, manager_of, names, save


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_each_checkpoint_is_copied_and_one_without_any_resumes_from_there(tmp_path, url):
    told = Told()
    manager = manager_of(tmp_path / "here", keep=1, default_hdfs_dir=url, tell=told)
    for step in (1, 2):
        save(manager, step, f"step {step}")
    manager.finish()
    assert names(tmp_path / "here") == {"global_step_2"}
    # Nothing is removed there.
    assert storage.list_folders(url) == ["global_step_1", "global_step_2"]
    assert storage.read_text(storage.join(url, TRACKER)) == "2"
    assert sum("was copied to" in message for _, message in told.events) == 2
    there = manager_of(tmp_path / "there", default_hdfs_dir=url)
    found = find(there)
    assert found == [tmp_path / "there" / "global_step_2"]
    assert problem_of(found[0]) is None
    assert (found[0] / "actor/model.safetensors").read_bytes() == b"w" * 8
    assert is_copied(url, found[0])


def test_a_machine_with_an_older_checkpoint_of_the_run_takes_the_newer_one(tmp_path, url):
    manager = manager_of(tmp_path / "here", default_hdfs_dir=url)
    save(manager, 1)
    manager.finish()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    save(manager, 2)
    manager.finish()
    there = manager_of(tmp_path / "there", default_hdfs_dir=url)
    assert [path.name for path in find(there)] == ["global_step_2", "global_step_1"]
    # Another run that is in this folder goes on from its own.
    other = manager_of(tmp_path / "there", default_hdfs_dir=url)
    other.folder.begin_run()
    save(other, 1)
    assert [path.name for path in find(other)] == ["global_step_1"]


def test_what_a_killed_start_has_fetched_goes_with_the_next_save(tmp_path, url):
    manager = manager_of(tmp_path / "here", default_hdfs_dir=url)
    save(manager, 1)
    manager.finish()
    there = manager_of(tmp_path / "there", default_hdfs_dir=url)
    start = multiprocessing.get_context("fork").Process(target=_killed_while_fetching, args=(there,))
    start.start()
    start.join()
    assert start.exitcode == -signal.SIGKILL
    (left,) = (path.name for path in (tmp_path / "there").iterdir() if path.is_dir())
    assert find(there) == [tmp_path / "there" / "global_step_1"]
    save(there, 2)
    there.finish()
    assert {path.name for path in (tmp_path / "there").iterdir() if path.is_dir()} == {"global_step_1", "global_step_2"}
    assert "global_step_1" in left


def _killed_while_fetching(manager):
    def fetch(url, facts, folder):
        (folder / "half").write_text("of it")
        os.kill(os.getpid(), signal.SIGKILL)

    storage_folders.fetch = fetch
    find(manager)


def test_half_a_copy_is_none(tmp_path, url):
    manager = manager_of(tmp_path / "here", default_hdfs_dir=url)
    for step in (1, 2):
        save(manager, step)
    manager.finish()
    system, path = storage.filesystem(storage.join(url, "global_step_2", "manifest.json"))
    system.rm_file(path)
    assert storage.name_of(newest_remote(url)) == "global_step_1"
    assert not is_copied(url, tmp_path / "here" / "global_step_2")


def test_a_copy_that_does_not_match_its_manifest_is_refused(tmp_path, url):
    manager = manager_of(tmp_path / "here", default_hdfs_dir=url)
    save(manager, 1)
    manager.finish()
    storage.write_text(storage.join(url, "global_step_1", "actor/model.safetensors"), "short")
    with pytest.raises(CheckpointError, match="has 5 bytes"):
        find(manager_of(tmp_path / "there", default_hdfs_dir=url))
    assert names(tmp_path / "there") == set()


def test_a_checkpoint_is_named_by_its_url(tmp_path, url):
    manager = manager_of(tmp_path / "here", default_hdfs_dir=url)
    save(manager, 3)
    manager.finish()
    named = manager_of(tmp_path / "there", mode="resume_path", path=storage.join(url, "global_step_3"))
    (found,) = find(named)
    assert found.name == "global_step_3"
    assert problem_of(found) is None


def test_copying_blocks_nobody_and_what_waits_for_it_is_not_removed(tmp_path, monkeypatch):
    may_go = threading.Event()
    upload = storage.upload_folder

    def slow(*args, **kwargs):
        assert may_go.wait(60)
        upload(*args, **kwargs)

    monkeypatch.setattr(remote_module.storage, "upload_folder", slow)
    manager = manager_of(tmp_path / "here", keep=1, default_hdfs_dir=f"file://{tmp_path}/store")
    for step in (1, 2, 3):
        save(manager, step)
    assert names(tmp_path / "here") == {"global_step_1", "global_step_2", "global_step_3"}
    may_go.set()
    manager.finish()
    assert names(tmp_path / "here") == {"global_step_3"}
    save(manager, 4)
    assert names(tmp_path / "here") == {"global_step_4"}
    manager.finish()
    assert len(storage.list_folders(f"file://{tmp_path}/store")) == 4


def test_a_copy_that_fails_is_told_and_counted_and_the_next_one_is_made(tmp_path, monkeypatch):
    upload = storage.upload_folder

    def failing(local, target, **kwargs):
        if target.endswith("global_step_1"):
            raise StorageError("the bucket is gone.")
        upload(local, target, **kwargs)

    monkeypatch.setattr(remote_module.storage, "upload_folder", failing)
    told = Told()
    uploads = Uploads(f"file://{tmp_path}/store", told, pause=0.0)
    manager = manager_of(tmp_path / "here", tell=told)
    for step in (1, 2):
        save(manager, step)
        uploads.add(tmp_path / "here" / f"global_step_{step}")
    uploads.finish()
    assert uploads.num_failed == 1
    assert [message for kind, message in told.events if kind == "warning"] == [
        f"global_step_1 was not copied to file://{tmp_path}/store: the bucket is gone. It is on this machine's disk."
    ]
    assert storage.list_folders(f"file://{tmp_path}/store") == ["global_step_2"]


@pytest.mark.parametrize("mode", ["disable", "auto"])
def test_a_url_that_cannot_be_reached_is_an_error_before_anything_starts(tmp_path, mode):
    with pytest.raises(StorageError, match="fsspec knows no places of nowhere://"):
        find(manager_of(tmp_path, mode=mode, default_hdfs_dir="nowhere://bucket/run"))
