"""Loggers: nothing is lost, nothing is rounded in the file, and what is missing is said."""

import dataclasses
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from burnish.utils import tracking
from burnish.utils.errors import ConfigError
from burnish.utils.tracking import ConsoleLogger, RunInfo, Tracking, check_loggers


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make(run_dir, *backends, config=None, resumed_step=0):
    return Tracking("project", "experiment", list(backends), run_dir, config, resumed_step)


def test_the_file_has_one_object_a_step_with_all_digits(tmp_path):
    log = make(tmp_path / "new" / "folder", "file")
    log.log({"a": 1 / 3, "b": 2}, step=1)
    log.log({"a": 1e-300}, step=2)
    # Before finish: a killed run keeps its steps.
    assert lines(tmp_path / "new" / "folder") == [{"step": 1, "a": 1 / 3, "b": 2}, {"step": 2, "a": 1e-300}]
    log.finish()


def test_a_resumed_run_appends(tmp_path):
    for step in (1, 2):
        log = make(tmp_path, "file", resumed_step=step - 1)
        log.log({"a": step}, step)
        log.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("left", ['{"step": 1}\n{"step": 2, "a": 0.1', '{"step": 1}\n'])
def test_half_a_line_of_a_killed_run_is_dropped_on_resume(tmp_path, left):
    (tmp_path / "metrics.jsonl").write_text(left)
    log = make(tmp_path, "file", resumed_step=1)
    log.log({"a": 1.0}, step=2)
    log.finish()
    assert lines(tmp_path) == [{"step": 1}, {"step": 2, "a": 1.0}]


def test_scalars_of_torch_and_numpy_are_numbers_and_non_finite_ones_stay_visible(tmp_path):
    log = make(tmp_path, "file")
    log.log({"t": torch.tensor(2.5), "n": np.float32(0.5), "i": np.int64(3), "nan": math.nan, "inf": math.inf}, step=1)
    log.finish()
    (line,) = lines(tmp_path)
    assert (line["t"], line["n"], line["i"], line["inf"]) == (2.5, 0.5, 3, math.inf)
    assert math.isnan(line["nan"])


def test_a_metric_that_is_no_number_is_named_and_reaches_no_logger(tmp_path):
    log = make(tmp_path, "file")
    with pytest.raises(TypeError, match="'actor/loss' is 'high'"):
        log.log({"a": 1.0, "actor/loss": "high"}, step=1)
    log.finish()
    assert lines(tmp_path) == []


def test_the_console_shows_one_compact_line_with_validation_and_trouble():
    line = ConsoleLogger(None).line(
        {
            "critic/score/mean": 0.123456,
            "timing_s/gen": 3.0,
            "timing_s/step": 5.0,
            "val/gsm8k/mean@1": 0.5,
            "reward/error_count": 2,
            "reward/non_finite_count": 0,
        },
        step=7,
    )
    assert line == "step 7  score 0.1235  seconds 5  val/gsm8k/mean@1 0.5  reward/error_count 2"


def test_metrics_that_nobody_foresaw_are_shown_whole():
    assert ConsoleLogger(None).line({"mine": 1.0}, step=1) == "step 1  mine 1"


def test_the_console_prints_text_as_it_is_and_on_one_line(tmp_path, capsys):
    log = make(tmp_path, "console")
    metrics = {f"[bold]:smile: number {index}": float(index) for index in range(40)}
    log.log(metrics, step=1)
    log.finish()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "[bold]:smile: number 39 39" in out


def test_an_unknown_logger_is_refused_with_the_choices_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.logger=wandbb.*wandb.*console, file, tensorboard, wandb"):
        make(tmp_path / "run", "file", "wandbb")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("backend", "module"),
    [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")],
    ids=["wandb", "tensorboard"],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, backend, module):
    monkeypatch.setitem(sys.modules, module, None)
    finished = []
    close = tracking.FileLogger.finish
    monkeypatch.setattr(tracking.FileLogger, "finish", lambda self: (finished.append(self), close(self)))
    with pytest.raises(ConfigError, match=f"pip install {backend}"):
        make(tmp_path, "file", backend)
    assert len(finished) == 1


@dataclasses.dataclass
class Config:
    lr: float = 0.5


@pytest.fixture
def fake_wandb(monkeypatch):
    calls = []

    def init(**kwargs):
        calls.append(("init", kwargs))
        return SimpleNamespace(
            id="abc",
            log=lambda data, step: calls.append(("log", data, step)),
            finish=lambda: calls.append(("finish",)),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


def test_wandb_gets_the_configuration_and_a_resumed_run_continues_its_curve(tmp_path, fake_wandb):
    for step in (1, 2):
        log = make(tmp_path, "wandb", config=Config())
        log.log({"a": 1.0}, step)
        log.finish()
    inits = [call[1] for call in fake_wandb if call[0] == "init"]
    assert [call["id"] for call in inits] == [None, "abc"]
    assert inits[0]["config"] == {"lr": 0.5}
    assert (inits[0]["project"], inits[0]["name"]) == ("project", "experiment")
    assert [call for call in fake_wandb if call[0] != "init"] == [
        ("log", {"a": 1.0}, 1),
        ("finish",),
        ("log", {"a": 1.0}, 2),
        ("finish",),
    ]


def test_tensorboard_holds_the_last_step(tmp_path):
    pytest.importorskip("tensorboard")
    log = make(tmp_path, "tensorboard", config={"lr": 1.0})
    log.log({"a": 1.0}, step=3)
    log.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(3, 1.0)]


def test_finish_closes_every_logger_once_even_if_one_fails(tmp_path, monkeypatch):
    closed = []

    class Failing:
        def __init__(self, info: RunInfo):
            pass

        def finish(self):
            closed.append("failing")
            raise OSError("the network is gone")

    monkeypatch.setitem(tracking.LOGGERS._entries, "failing", Failing)
    log = make(tmp_path, "file", "failing", "console")
    with pytest.raises(OSError, match="network"):
        log.finish()
    log.finish()
    assert closed == ["failing"]
    assert log.loggers[0]._file.closed


def test_importing_the_console_and_the_tracking_loads_neither_rich_nor_torch():
    code = "import sys, burnish.utils.console, burnish.utils.tracking; print({'rich', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_two_consoles_write_to_the_two_streams(capsys):
    from burnish.utils.console import console, error_console

    console.print("[8, 8]")
    error_console.print("trouble")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[8, 8]\n", "trouble\n")


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run_of(folder, steps, resumed_step=0):
    tracking = Tracking("p", "e", ["file"], folder, resumed_step=resumed_step)
    for step in steps:
        tracking.log({"x": 1.0}, step)
    tracking.finish()


def test_a_run_from_the_start_sets_the_log_of_an_older_one_aside(tmp_path):
    run_of(tmp_path, [1, 2, 3])
    run_of(tmp_path, [1, 2])
    run_of(tmp_path, [1])
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [1, 2, 3]
    assert steps_in(tmp_path / "metrics.2.jsonl") == [1, 2]


def test_a_resumed_run_goes_on_behind_the_step_that_it_resumed(tmp_path):
    run_of(tmp_path, [1, 2, 3, 4])
    run_of(tmp_path, [3, 4, 5], resumed_step=2)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert steps_in(tmp_path / "metrics.1.jsonl") == [1, 2, 3, 4]


def test_loggers_are_checked_before_anything_starts(monkeypatch):
    check_loggers(["console", "file"])
    with pytest.raises(ConfigError, match="Did you mean 'console'"):
        check_loggers(["consol"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_loggers(["wandb"])
