"""Where a process stands is seen from outside, and never ends it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.utils import stacks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Stacks of other processes are Linux only.")

STUCK = """
import threading, time
{prepare}
def waits_for_ever():
    print("stuck", flush=True)
    time.sleep(1000)
def other():
    time.sleep(1000)
threading.Thread(target=other, daemon=True).start()
waits_for_ever()
"""


@pytest.fixture
def start(monkeypatch):
    # As where py-spy is not installed.
    monkeypatch.setattr(stacks, "_by_py_spy", lambda pid: None)
    processes = []

    def start(prepare: str) -> subprocess.Popen:
        program = STUCK.format(prepare=prepare)
        processes.append(
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
        )
        assert processes[-1].stdout.readline() == "stuck\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_process_that_agreed_shows_all_its_threads_again_and_again(start):
    process = start("from burnish.utils import stacks; stacks.make_visible()")
    for _ in range(2):
        text = stacks.of_process(process.pid)
        assert text.count("waits_for_ever") == 1
        assert text.count("in other") == 1
        assert stacks.innermost(text).endswith("in waits_for_ever")
    assert process.poll() is None


def test_a_process_that_did_not_agree_is_left_alone(start):
    process = start("")
    assert stacks.of_process(process.pid) is None
    assert process.poll() is None


def test_what_a_process_started_is_shown_with_it(start):
    process = start("from burnish.utils import stacks; stacks.make_visible()")
    text = stacks.of_tree(os.getpid())
    assert "test_what_a_process_started_is_shown_with_it" in text.split("Process ")[1]
    assert f"Process {process.pid}: " in text
    assert "waits_for_ever" in text
    assert process.pid in list(stacks.descendants(os.getpid()))


def test_the_main_thread_is_found_in_each_form():
    own = stacks.of_this_process()
    assert stacks.innermost(own).endswith("in of_this_process")
    py_spy = (
        'Process 7: python x.py\nPython v3.12\n\nThread 8 (idle): "worker"\n    run (threading.py:5)\n'
        'Thread 7 (active): "MainThread"\n    deep (loss.py:12)\n    main (x.py:3)\n'
    )
    assert stacks.innermost(py_spy) == "loss.py:12 in deep"
    assert stacks.innermost("nothing of the kind") is None


def test_stacks_are_kept_under_names_of_their_own_and_elsewhere_where_the_folder_cannot_be_written(tmp_path):
    first, second = (stacks.write(tmp_path / "stacks", "actor/ref rank 0", "text") for _ in range(2))
    assert first != second
    assert first.parent == tmp_path / "stacks"
    assert "actor_ref_rank_0" in first.name
    (tmp_path / "file").touch()
    other = stacks.write(tmp_path / "file" / "stacks", "driver", "text")
    assert other.read_text() == "text"
    Path(other).unlink()
