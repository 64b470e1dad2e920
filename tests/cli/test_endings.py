"""A command ends with a sentence and a status, whatever ends it."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.trainer.ending import Terminated, exit_status, keeps_sigterm
from burnish.trainer.run import _as_raised
from burnish.utils.errors import ConfigError, ModelError, TrainingError, WorkerError

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "examples" / "tiny_model"

# A shell that starts programs in the background has them ignore Ctrl-C; a terminal does not.
AS_IN_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from burnish.trainer.main_ppo import main
sys.exit(main(sys.argv[1:]))
"""


def start_run(folder: Path) -> subprocess.Popen:
    overrides = [
        "recipe=demo",
        f"actor_rollout_ref.model.path={TINY / 'model'}",
        f"data.train_files={TINY / 'data' / 'train.jsonl'}",
        "data.val_files=null",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=10000",
        f"trainer.default_local_dir={folder}",
    ]
    return subprocess.Popen(
        [sys.executable, "-u", "-c", AS_IN_A_TERMINAL, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPO,
    )


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_ends_a_run_with_a_sentence_and_its_status(tmp_path, number, status, name):
    run = start_run(tmp_path)
    for line in run.stdout:
        if line.startswith("step 1 "):
            break
    run.send_signal(number)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == status
    assert re.search(rf"Stopped by {name} (in|after) step \d+.*\. Step \d+ is saved\.", out, re.S)
    assert list(tmp_path.glob("global_step_*/manifest.json"))
    assert str(tmp_path) in out
    assert "Traceback" not in out


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
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


def test_sigterm_means_again_what_it_meant_before_once_the_command_has_ended():
    before = signal.getsignal(signal.SIGTERM)
    assert exit_status(lambda: 0) == 0
    assert signal.getsignal(signal.SIGTERM) is before


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
        with pytest.raises(KeyboardInterrupt) as caught, _as_raised():
            waits(signalled)
        assert type(caught.value) is signalled
