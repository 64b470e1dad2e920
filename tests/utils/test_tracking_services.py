"""Loggers of services: one run and one value a step however often a run is resumed, and what they are told.

Fakes stand for the packages, and record; where a package is installed its own files are read, too.
"""

import errno
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.utils.tracking import Tracking

ROWS = [
    {"step": 2, "uid": "val-1", "prompt": "p \ud800", "response": "r", "score": 0.5, "ground_truth": {"a": [1]}},
    {"step": 2, "uid": "val-2", "prompt": "q", "response": "<b>s", "score": 1.0, "ground_truth": "4", "acc": True},
]
CONFIG = {"trainer": {"lr": 0.5, "hf_token": "hf_abcdefgh12345"}, "none": None}


def attempt(run_dir, name, steps, resumed_step=0):
    log = Tracking("project", "experiment", [name], run_dir, CONFIG, resumed_step)
    for step in steps:
        if step == 2:
            log.log_generations(ROWS, step)
        log.log({"val-core/g/acc/mean@8": float(step), "nan": math.nan}, step)
    log.finish()


def twice(run_dir, name):
    """Steps 1 to 4, killed, and from the checkpoint of step 2 on to step 6; its validation comes late."""
    attempt(run_dir, name, [1, 2, 3, 4])
    attempt(run_dir, name, [2, 3, 4, 5, 6], resumed_step=2)


class Fakes:
    """The packages wandb, mlflow, swanlab and trackio, as far as they are called."""

    def __init__(self):
        self.inits, self.logs, self.tables, self.finished, self.num_runs = [], [], [], 0, 0

    def init(self, **kwargs):
        self.inits.append(kwargs)
        self.arguments = sys.argv
        self.num_runs += 1
        return SimpleNamespace(
            id=kwargs.get("id") or f"run-{self.num_runs}",
            name=kwargs.get("name"),
            log=self.log,
            finish=self.finish,
            define_metric=lambda *args, **kwargs: None,
        )

    def log(self, data, step=None, commit=None):
        step = data.get("training/global_step") if step is None else step
        if "val/generations" in data:
            self.tables.append((step, data["val/generations"]))
        else:
            self.logs.append((step, data["val-core/g/acc/mean@8"]))

    def finish(self):
        self.finished += 1

    def Table(self, columns, data, **kwargs):
        return data

    def Text(self, text):
        return text


@pytest.fixture
def fakes(monkeypatch):
    fakes = Fakes()
    for name in ("wandb", "swanlab", "trackio"):
        monkeypatch.setitem(sys.modules, name, fakes)
    return fakes


def test_a_service_gets_every_step_also_while_the_disk_is_full(tmp_path, fakes, monkeypatch):
    taken, write_text = [], Path.write_text

    def write_text_while_there_is_room(self, *args, **keys):
        # Of the run's name and of its first step.
        if len(taken) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken.append(self)
        return write_text(self, *args, **keys)

    monkeypatch.setattr(Path, "write_text", write_text_while_there_is_room)
    attempt(tmp_path, "wandb", [1, 2, 3])
    assert [step for step, _ in fakes.logs] == [1, 2, 3]
    assert json.loads((tmp_path / "tracking" / "wandb.json").read_text())["last_step"] == 1


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_resumed_run_goes_on_in_the_same_one_and_sends_no_step_twice(tmp_path, fakes, name, caplog):
    twice(tmp_path, name)
    # The step of the checkpoint may be added to, by the validation that comes first; 3 and 4 were there.
    assert [step for step, _ in fakes.logs] == [1, 2, 3, 4, 2, 5, 6]
    assert fakes.finished == 2
    first, second = fakes.inits
    assert first["project"] == "project"
    assert first["config"] == {"trainer": {"lr": 0.5, "hf_token": "<redacted>"}, "none": None}
    if name == "trackio":
        assert (first["resume"], second["resume"]) == ("never", "allow")
        assert first["name"] == second["name"] == "experiment"
    else:
        assert (first.get("id"), second["id"]) == (None, "run-1")
        assert second["resume"] == "allow"
    assert f"{name} has this run's steps up to 4 already" in caplog.text


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_run_from_the_start_is_a_new_one(tmp_path, fakes, name):
    attempt(tmp_path, name, [1, 2])
    attempt(tmp_path, name, [1])
    assert [step for step, _ in fakes.logs] == [1, 2, 1]
    assert all(init.get("id") is None for init in fakes.inits)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_secrets_of_the_command_line_are_hidden_from_a_service(tmp_path, fakes, name, monkeypatch):
    given = ["train", "trainer.lr=0.5", "reward.reward_kwargs.api_key=sk-of-the-command-line"]
    monkeypatch.setattr(sys, "argv", given)
    attempt(tmp_path, name, [1])
    assert fakes.arguments == ["train", "trainer.lr=0.5", "reward.reward_kwargs.api_key=<redacted>"]
    assert sys.argv is given


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_responses_of_a_validation_become_a_table(tmp_path, fakes, name):
    attempt(tmp_path, name, [1, 2])
    ((step, table),) = fakes.tables
    assert step == 2
    assert len(table) == 2
    text = str(table)
    for part in ("val-1", "p ?", "r", "0.5", "{'a': [1]}"):
        assert part in text


def test_mlflow_has_one_value_a_step_and_the_configuration(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    from burnish.utils.tracking.mlflow import _local_uri

    twice(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=_local_uri(tmp_path))
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "experiment"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"trainer.lr": "0.5", "trainer.hf_token": "<redacted>"}
    history = client.get_metric_history(run.info.run_id, "val-core/g/acc/mean_at_8")
    assert sorted({(metric.step, metric.value) for metric in history}) == [(step, float(step)) for step in range(1, 7)]
    assert len(history) == 7
    (table,) = client.list_artifacts(run.info.run_id, "val_generations")
    assert table.path == "val_generations/step_2.json"


def run_apart(tmp_path, name, **environment):
    """`twice` in a process of its own: these packages hold on to the one that they are started in."""
    code = "import sys; from tests.utils.test_tracking_services import twice; twice(sys.argv[1], sys.argv[2])"
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert "switched off" not in result.stderr + result.stdout
    assert "did not close well" not in result.stderr + result.stdout
    state = json.loads((tmp_path / "tracking" / f"{name}.json").read_text())
    assert state["last_step"] == 6
    return state["id"]


@pytest.mark.slow
def test_wandb_itself_continues_one_run(tmp_path):
    pytest.importorskip("wandb")
    run_id = run_apart(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(run_id) for folder in folders)
    assert b"hf_abcdefgh12345" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_trackio_itself_has_one_value_a_step(tmp_path):
    pytest.importorskip("trackio")
    run_apart(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "home"))
    (database_file,) = (tmp_path / "home").rglob("*.db")
    with sqlite3.connect(database_file) as database:
        steps = [step for (step,) in database.execute("select step from metrics order by id")]
    # The table of step 2 is a row of its own, and so is the late validation of that step.
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert [steps.count(step) for step in (1, 3, 4, 5, 6)] == [1, 1, 1, 1, 1]


@pytest.mark.slow
def test_swanlab_itself_keeps_a_run_on_this_computer(tmp_path):
    pytest.importorskip("swanlab")
    run_id = run_apart(tmp_path, "swanlab", SWANLAB_MODE="offline")
    assert any(run_id in path.name for path in (tmp_path / "swanlab").iterdir())
