"""A command ends with a sentence and a status, whatever ends it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.trainer.ending import Terminated, as_raised, exit_status, keeps_sigterm
from burnish.utils.errors import ConfigError, ModelError, TrainingError, WorkerError
from burnish.utils.events import read_events

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "examples" / "tiny_model"
SECONDS = 240
"""That a run of a few steps, or the end of one, may take on a machine that is busy."""

# A shell that starts programs in the background has them ignore Ctrl-C; a terminal does not.
AS_IN_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from burnish.trainer.main_ppo import main
sys.exit(main(sys.argv[1:]))
"""


_STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_left():
    """A run that a failed test leaves would go on beside the tests that follow."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        process.kill()
        process.wait()


def start_run(folder: Path, *more: str, **options) -> subprocess.Popen:
    overrides = [
        "recipe=demo",
        f"actor_rollout_ref.model.path={TINY / 'model'}",
        f"data.train_files={TINY / 'data' / 'train.jsonl'}",
        "data.val_files=null",
        "data.train_batch_size=8",
        # Rendering thousands of rows would take longer than the steps.
        "data.train_max_samples=256",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=10000",
        f"trainer.default_local_dir={folder}",
        *more,
    ]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-u", "-c", AS_IN_A_TERMINAL, *overrides]
    _STARTED.append(subprocess.Popen(command, cwd=REPO, **(streams | options)))
    return _STARTED[-1]


def logged_steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def how_it_ended(folder: Path) -> str:
    *_, last = read_events(folder)
    return last["message"]


def wait_for_step(folder: Path, step: int, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while logged_steps(folder) < step:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "status", "name"),
    [
        # Other runs here end by Ctrl-C and by the end of their terminal.
        pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.slow),
        (signal.SIGTERM, 143, "SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "SIGHUP", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_with_a_sentence_and_its_status(tmp_path, number, status, name):
    run = start_run(tmp_path)
    for line in run.stdout:
        if line.startswith("step 1 "):
            break
    run.send_signal(number)
    out, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == status
    assert re.search(rf"Stopped by {name} (in|after) step \d+.*\. Step \d+ is saved\.", out, re.S)
    assert list(tmp_path.glob("global_step_*/manifest.json"))
    assert str(tmp_path) in out
    assert "Traceback" not in out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Terminals of other systems are closed otherwise.")
@pytest.mark.parametrize("by", ["system", "nohup", "disown"])
def test_a_run_whose_terminal_is_closed_saves_and_ends_unless_it_is_not_to_hear_of_it(tmp_path, by):
    terminal, of_run = pty.openpty()

    def prepare() -> None:
        if by == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if by != "disown":
            # Whoever leads a session and opens a terminal has it as the session's own, and is told of its end.
            os.close(os.open(os.ttyname(of_run), os.O_RDWR))

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), of_run)
    steps = () if by == "system" else ("trainer.total_training_steps=6",)
    run = start_run(tmp_path, *steps, start_new_session=True, preexec_fn=prepare, **streams)
    os.close(of_run)
    wait_for_step(tmp_path, 1, run)
    os.close(terminal)
    ended = run.wait(SECONDS), how_it_ended(tmp_path)
    assert list(tmp_path.glob("global_step_*/manifest.json"))
    if by == "system":
        assert ended[0] == 129
        assert re.fullmatch(r"Stopped by SIGHUP .* Step \d+ is saved\.", ended[1])
    else:
        assert ended == (0, "Finished after step 6.")


@pytest.mark.skipif(sys.platform != "linux", reason="Terminals of other systems are closed otherwise.")
def test_a_command_whose_terminal_is_closed_ends_with_its_status():
    terminal, of_command = pty.openpty()
    ready, tells = os.pipe()
    command = f"""
import os, sys, time
from burnish.trainer.ending import exit_status
def waits():
    os.write({tells}, b".")
    time.sleep(60)
sys.exit(exit_status(waits))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        **dict.fromkeys(("stdin", "stdout", "stderr"), of_command),
        cwd=REPO,
        pass_fds=[tells],
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(of_command), os.O_RDWR)),
    )
    _STARTED.append(process)
    os.close(of_command)
    # Else its end before that would be waited for without end.
    os.close(tells)
    assert os.read(ready, 1) == b"."
    os.close(terminal)
    assert process.wait(SECONDS) == 129
    os.close(ready)


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_any_more_what_it_and_its_reward_function_print(tmp_path):
    (tmp_path / "talks.py").write_text("def compute_score(**row):\n    print(row)\n    return 1.0")
    function = ("reward.num_workers=1", f"reward.custom_reward_function.path={tmp_path / 'talks.py'}")
    run = start_run(tmp_path, "trainer.total_training_steps=3", *function)
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(SECONDS) == 0
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert last["critic/score/mean"] == 1.0
    assert how_it_ended(tmp_path) == "Finished after step 3."
    assert logged_steps(tmp_path) == 3


@pytest.mark.slow
def test_ctrl_c_that_ends_the_reader_too_lets_the_run_save(tmp_path):
    """As in `burnish train | tee log`."""
    run = start_run(tmp_path)
    wait_for_step(tmp_path, 1, run)
    run.stdout.close()
    run.send_signal(signal.SIGINT)
    assert run.wait(SECONDS) == 130
    assert re.fullmatch(r"Stopped by Ctrl-C .* Step \d+ is saved\.", how_it_ended(tmp_path))


@pytest.mark.parametrize(
    ("stop", "status"), [(KeyboardInterrupt(), 130), (Terminated(), 143), (Terminated(signal.SIGHUP), 129)]
)
def test_a_command_that_is_stopped_while_it_loads_says_so(capsys, stop, status):
    def loads() -> int:
        raise stop

    assert exit_status(loads) == status
    assert "Stopped before training began." in capsys.readouterr().err


def test_a_command_that_trains_nothing_says_what_was_stopped(capsys):
    def checks() -> int:
        raise KeyboardInterrupt

    assert exit_status(checks, when_stopped="Stopped before the checks had ended.") == 130
    assert capsys.readouterr().err == "Stopped before the checks had ended.\n"


def test_signals_mean_again_what_they_meant_before_once_the_command_has_ended():
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert exit_status(lambda: signal.raise_signal(signal.SIGHUP) or 0) == 129
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_comes_twice_at_once_does_not_interrupt_what_the_first_one_ends(monkeypatch, number):
    # However busy the machine is: two signals that follow each other come at once.
    monkeypatch.setattr("burnish.trainer.ending.SECONDS_OF_AN_ECHO", 600.0)
    put_away = []

    def command() -> int:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            put_away.append(True)
        return 0

    assert exit_status(command) == 128 + number
    assert put_away


def test_sigterm_while_ray_starts_with_a_handler_of_its_own_ends_the_command_likewise(capsys):
    def leave(number, frame):
        sys.exit(number)

    def command() -> int:
        ours = signal.getsignal(signal.SIGTERM)
        with keeps_sigterm():
            signal.signal(signal.SIGTERM, leave)
        assert signal.getsignal(signal.SIGTERM) is ours
        with keeps_sigterm():
            signal.signal(signal.SIGTERM, leave)
            signal.raise_signal(signal.SIGTERM)
        return 0

    assert exit_status(command) == 143
    assert capsys.readouterr().err == "Stopped before training began.\n"


def raising(error: Exception, cause: Exception | None = None):
    def command() -> int:
        raise error from cause

    return command


def test_what_is_wrong_with_the_request_is_status_2_in_whatever_worker_it_was_found(capsys):
    assert exit_status(raising(WorkerError("rank 0 failed"), ModelError("no weights there"))) == 2
    assert capsys.readouterr().err == "ModelError: no weights there\n"
    assert exit_status(raising(ConfigError("no such key"))) == 2


def test_a_name_that_no_file_can_have_is_status_2_with_a_short_sentence(capsys, tmp_path):
    assert exit_status(lambda: (tmp_path / ("x" * 5000)).write_text("")) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: {str(tmp_path)[:40]}")
    assert said.endswith(": no file or folder can have so long a name. Name a shorter one.\n")
    assert len(said) < 500


def test_what_fails_in_the_run_is_status_1_and_what_nobody_foresaw_shows_where_it_came_from(capsys, caplog):
    assert exit_status(raising(TrainingError("not finite"))) == 1
    assert not caplog.records
    assert exit_status(raising(WorkerError("rank 0 failed"), ZeroDivisionError("by zero"))) == 1
    assert caplog.records[0].exc_info is not None
    assert capsys.readouterr().err.endswith("WorkerError: rank 0 failed\n")


def test_sigterm_that_native_code_has_made_a_ctrl_c_is_sigterm_again():
    def waits(signalled: type[KeyboardInterrupt]) -> None:
        try:
            raise signalled
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    for signalled in (Terminated, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt) as caught, as_raised():
            waits(signalled)
        assert type(caught.value) is signalled
