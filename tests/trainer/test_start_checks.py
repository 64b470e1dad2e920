"""What is looked at before a run starts."""

import json
import logging
import os
import subprocess
import sys
import time

import pytest

import burnish
from burnish.config import load_config
from burnish.config.usage import track, unread
from burnish.trainer.restarts import HEARTBEAT
from burnish.trainer.start_checks import check_folder, check_nobody_runs_in, run_without_validation_data
from burnish.utils.errors import ConfigError


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_two_runs_do_not_share_a_folder(tmp_path, other):
    def beat(**said):
        (tmp_path / HEARTBEAT).write_text(json.dumps({"time": time.time(), "pid": other.pid, "stage": "gen", **said}))

    check_nobody_runs_in(str(tmp_path))
    beat()
    with pytest.raises(ConfigError, match=rf"another run is writing there \(process {other.pid}, "):
        check_nobody_runs_in(str(tmp_path))
    for said in ({"stage": "ended"}, {"time": time.time() - 3600}, {"pid": os.getpid()}):
        beat(**said)
        check_nobody_runs_in(str(tmp_path))
    beat()
    other.kill()
    other.wait()
    check_nobody_runs_in(str(tmp_path))
    (tmp_path / HEARTBEAT).write_text("{")
    check_nobody_runs_in(str(tmp_path))


def test_a_file_in_place_of_a_folder_is_said(tmp_path):
    check_folder("trainer.default_local_dir", str(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="local_dir=.*there is a file in its place. Name another one"):
            check_folder("trainer.default_local_dir", str(path))


@pytest.mark.parametrize("begin", [burnish.train, burnish.sft])
def test_a_callback_that_is_no_function_is_refused_before_anything_is_read(begin):
    with pytest.raises(ConfigError, match="callbacks: 3 is not a function"):
        begin("no/model", ["no rows"], callbacks=[print, 3])


def test_keys_of_validation_are_told_once_where_there_is_no_data(caplog):
    config = track(load_config(["data.train_files=a.jsonl", "data.val_files=null", "trainer.test_freq=5"]))
    with caplog.at_level(logging.WARNING, logger="burnish.trainer"):
        run_without_validation_data(config)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("No effect here: trainer.test_freq=5. The reason: there is nothing to validate on")
    assert "trainer.test_freq" not in unread(config)
