"""What is looked at before a run starts."""

import json
import os
import subprocess
import sys
import time

import pytest

from burnish.trainer.restarts import HEARTBEAT
from burnish.trainer.start_checks import check_nobody_runs_in
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
