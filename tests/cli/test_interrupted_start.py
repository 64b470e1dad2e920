"""Ctrl-C while a command still loads what it needs ends it with one line, whatever is being imported just then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "examples" / "tiny_model"

# Python runs a module of this name first, in every process that the command starts.
SITE = """
import os, signal, sys

class CtrlC:
    # When the module is looked for, as at any other moment of its import.
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["CTRL_C_AT"] and (os.environ["IN"] in os.environ or not os.environ["IN"]):
            os.kill(os.getpid(), signal.SIGINT)

# As in a terminal: a shell that starts programs in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
"""

# What an import may do with an exception that is none of its business.
DEAF = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:
    pass
"""

RUN = [
    "recipe=demo",
    f"actor_rollout_ref.model.path={TINY / 'model'}",
    f"data.train_files={TINY / 'data' / 'train.jsonl'}",
    "data.val_files=null",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
]
BURNISH = ["-c", "from burnish.cli.main import main; main()"]
TRAINING, CHECK = "Stopped before training began.", "Stopped before the check had ended."


def environment(folder: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder), str(REPO)])
    return os.environ | {"PYTHONPATH": path, "CTRL_C_AT": "", "IN": ""} | variables


def interrupted(folder: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITE)
    arguments = [sys.executable, *command, f"trainer.default_local_dir={folder / 'run'}"]
    return subprocess.run(
        arguments, env=environment(folder, **variables), cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("command", "module", "said"),
    [
        ([*BURNISH, "train", *RUN], "typer", "Stopped by Ctrl-C."),
        ([*BURNISH, "train", *RUN], "burnish.trainer.main_ppo", "Stopped by Ctrl-C."),
        ([*BURNISH, "train", *RUN], "torch", TRAINING),
        ([*BURNISH, "check", *RUN], "packaging.markers", CHECK),
        ([*BURNISH, "check", *RUN], "numpy", CHECK),
        ([*BURNISH, "sft", f"model.path={TINY / 'model'}"], "burnish.config", "Stopped by Ctrl-C."),
        (["-m", "burnish.trainer.main_ppo", *RUN], "burnish.config", "Stopped by Ctrl-C."),
        (["-m", "burnish.trainer.sft"], "burnish.config", "Stopped by Ctrl-C."),
        (["-m", "burnish", "version"], "typer", "Stopped by Ctrl-C."),
    ],
)
def test_ctrl_c_in_the_midst_of_an_import_is_one_line_and_status_130(tmp_path, command, module, said):
    done = interrupted(tmp_path, command, CTRL_C_AT=module)
    assert (done.returncode, done.stderr) == (130, f"{said}\n")


def test_so_it_is_in_the_process_that_a_supervisor_starts(tmp_path):
    variables = {"CTRL_C_AT": "burnish.config", "IN": "BURNISH_SUPERVISOR"}
    done = interrupted(tmp_path, [*BURNISH, "train", *RUN, "trainer.max_restarts=1"], **variables)
    assert (done.returncode, done.stderr) == (130, "Stopped by Ctrl-C.\n")


def test_an_import_that_catches_everything_does_not_keep_the_command_going(tmp_path):
    (tmp_path / "deaf.py").write_text(DEAF)
    command = "from burnish.trainer.ending import exit_status; exit(exit_status(lambda: __import__('deaf') and 0))"
    done = interrupted(tmp_path, ["-c", command])
    assert (done.returncode, done.stderr) == (130, f"{TRAINING}\n")


def test_where_something_has_begun_an_import_is_left_as_everything_else_is(tmp_path):
    (tmp_path / "imports.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    command = """
import sys
from burnish.trainer.ending import exit_status, something_to_lose
def begins():
    with something_to_lose():
        try:
            import imports
        finally:
            print("put away")
sys.exit(exit_status(begins))
"""
    done = interrupted(tmp_path, ["-c", command])
    assert (done.returncode, done.stdout, done.stderr) == (130, "put away\n", f"{TRAINING}\n")


WRITES = {
    "export": """
from burnish.trainer.offline.export import _becoming
def writes():
    with _becoming(Path("out").absolute()) as folder:
        (folder / "weights").touch()
        import imports
""",
    "smollm2": """
from burnish.cli import model
model.find_spec = lambda name: True
model._convert_by = lambda packages, made: made.mkdir()
def writes():
    model.run_smollm2("out")
""",
}


@pytest.mark.parametrize("command", [pytest.param("export", marks=pytest.mark.slow), "smollm2"])
def test_what_writes_a_model_takes_away_what_it_has_begun_when_an_import_is_interrupted(tmp_path, command):
    (tmp_path / "imports.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    start = "import sys\nfrom pathlib import Path\nfrom burnish.trainer.ending import exit_status\n"
    program = f"{start}{WRITES[command]}sys.exit(exit_status(writes))"
    done = interrupted(tmp_path, ["-c", program], CTRL_C_AT="burnish.model.smollm2")
    assert (done.returncode, done.stderr) == (130, f"{TRAINING}\n")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"imports.py", "sitecustomize.py"}


def test_signals_that_whoever_starts_a_command_ignores_stay_ignored(tmp_path):
    """Ctrl-C in the background of a shell, SIGHUP under nohup."""
    command = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from burnish.trainer.ending import exit_status
from burnish.utils.interrupts import end_at_ctrl_c
end_at_ctrl_c()
signal.raise_signal(signal.SIGINT)
exit_status(lambda: signal.raise_signal(signal.SIGINT))
exit_status(lambda: signal.raise_signal(signal.SIGHUP))
print("still here")
"""
    done = interrupted(tmp_path, ["-c", command])
    assert (done.returncode, done.stdout) == (0, "still here\n")
