"""Loggers: nothing is lost, nothing is rounded in the file, and what is missing is said."""

import json
import math
import os
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from burnish.utils import tracking
from burnish.utils.errors import ConfigError
from burnish.utils.events import EventLog, read_events
from burnish.utils.tracking import ConsoleLogger, RunInfo, Tracking, check_loggers, hub


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


ODD = {
    "text": "high",
    "none": None,
    "array": np.zeros(3),
    "list": [1.0],
    "complex": 1j,
    "huge": 10**400,
    "date": __import__("datetime").date(2000, 1, 1),
}


def test_odd_values_are_left_out_counted_and_told_once(tmp_path, caplog):
    log = make(tmp_path, "file")
    for step in (1, 2):
        log.log({"a": 1.0, **ODD}, step)
    log.finish()
    assert lines(tmp_path) == [{"step": step, "a": 1.0, "logging/dropped_values": 7.0} for step in (1, 2)]
    for name in ODD:
        assert caplog.text.count(f"The metric {name} is") == 1


@pytest.mark.parametrize(
    "value", [np.float16(0.5), np.array(0.5), np.array([0.5]), torch.tensor([[0.5]]), Decimal("0.5"), Fraction(1, 2)]
)
def test_whatever_is_one_number_is_logged_as_one(tmp_path, value):
    log = make(tmp_path, "file")
    log.log({"x": value, "yes": True, "numpy_yes": np.True_}, step=1)
    log.finish()
    assert lines(tmp_path) == [{"step": 1, "x": 0.5, "yes": 1, "numpy_yes": 1}]


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


def run_python(code, tmp_path, **environment):
    start = f"from burnish.utils.tracking import Tracking\nlog = Tracking('p', 'e', ['console'], {str(tmp_path)!r})\n"
    code = f"import os\n{start}{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )


def test_a_character_that_the_console_cannot_encode_is_an_escape_and_stands_in_nobodys_way(tmp_path):
    code = "log.log({'\u6570': 1.0}, 1)\nlog.log({'b': 2.0}, 2)"
    result = run_python(code, tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.stdout.splitlines() == [r"step 1  \u6570 1", "step 2  b 2"]
    assert result.stderr == ""


def test_a_console_that_nobody_reads_any_more_ends_no_run(tmp_path):
    code = """
readable, writable = os.pipe()
os.close(readable)
os.dup2(writable, 1)
for step in (1, 2):
    log.log({"a": 1.0}, step)
print("to nobody")
log.finish()
"""
    result = run_python(code, tmp_path)
    assert "The logger console failed at step 1 and is switched off" in result.stderr
    assert "nobody reads standard output any more" in result.stderr
    assert len(lines(tmp_path)) == 2


def test_an_unknown_logger_is_refused_with_the_choices_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.logger=wandbb.*wandb.*console, file, mlflow, .*, wandb"):
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
    with pytest.raises(ConfigError, match=rf"pip install 'burnish\[{backend}\]'"):
        make(tmp_path, "file", backend)
    assert len(finished) == 1


def scalars(folder, name="a"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_the_last_step_and_takes_back_what_is_run_again(tmp_path):
    pytest.importorskip("tensorboard")
    for resumed, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        log = make(tmp_path, "tensorboard", config={"lr": 1.0}, resumed_step=resumed)
        for step in steps:
            log.log({"a": float(10 * resumed + step)}, step)
        log.log_generations([{"prompt": "p", "response": "```\n<script>", "score": 1.0}], 3)
        log.finish()
    assert scalars(tmp_path / "tensorboard") == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]


def test_tensorboard_writes_where_its_variable_says(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    log = make(tmp_path / "run", "tensorboard")
    log.log({"a": 1.0}, step=1)
    log.finish()
    assert scalars(tmp_path / "elsewhere") == [(1, 1.0)]
    assert not (tmp_path / "run" / "tensorboard").exists()


class Recorder:
    """A logger of somebody's own, which does what a test wants."""

    def __init__(self, info: RunInfo):
        self.steps, self.threads, self.closed = [], set(), 0

    def log(self, data, step):
        self.steps.append(step)
        self.threads.add(threading.current_thread())

    def finish(self):
        self.closed += 1


def register(monkeypatch, name, logger):
    monkeypatch.setitem(tracking.LOGGERS._entries, name, logger)


def test_every_run_has_the_file_and_a_loggers_work_is_no_part_of_the_step(tmp_path, monkeypatch):
    register(monkeypatch, "own", Recorder)
    log = make(tmp_path, "own")
    own = log.loggers[1]
    log.log({"a": 1.0}, step=1)
    log.finish()
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}]
    assert own.steps == [1]
    assert own.threads.isdisjoint({threading.main_thread()})
    assert own.closed == 1


def test_a_logger_that_fails_is_switched_off_and_told_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    class Failing(Recorder):
        def log(self, data, step):
            super().log(data, step)
            raise OSError("the network is gone, token=abcdefgh1234")

    register(monkeypatch, "failing", Failing)
    register(monkeypatch, "own", Recorder)
    events = EventLog(tmp_path)
    log = Tracking("p", "e", ["failing", "own"], tmp_path, events=events)
    _, failing, own = log.loggers
    for step in (1, 2, 3):
        log.log({"a": 1.0}, step)
    log.finish()
    assert (failing.steps, own.steps) == ([1], [1, 2, 3])
    assert failing.closed == 1
    assert len(lines(tmp_path)) == 3
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["step"]) == ("warning", 1)
    assert "The logger failing failed at step 1 and is switched off" in event["message"]
    assert "the network is gone" in event["message"]
    assert "abcdefgh1234" not in event["message"] + caplog.text


def test_a_table_that_cannot_be_shown_costs_no_curve(tmp_path, monkeypatch, caplog):
    class NoTables(Recorder):
        def log_generations(self, rows, step):
            raise ValueError("no tables here")

    register(monkeypatch, "own", NoTables)
    log = make(tmp_path, "own")
    own = log.loggers[1]
    log.log_generations([{"prompt": "p"}], 1)
    log.log({"a": 1.0}, step=1)
    log.finish()
    assert own.steps == [1]
    assert "does not show the responses of step 1: ValueError: no tables here" in caplog.text


def test_a_logger_that_cannot_start_ends_the_run_before_it_begins(tmp_path, monkeypatch):
    def no_login(info):
        raise PermissionError("no API key")

    register(monkeypatch, "own", no_login)
    with pytest.raises(ConfigError, match=r"trainer.logger names own, which cannot start: PermissionError: no API key"):
        make(tmp_path, "own")


def test_a_service_that_never_answers_holds_neither_the_steps_nor_the_end_of_a_run(tmp_path, monkeypatch, caplog):
    asked, answer = threading.Event(), threading.Event()

    class Hanging(Recorder):
        def log(self, data, step):
            asked.set()
            answer.wait(60)

    register(monkeypatch, "own", Hanging)
    monkeypatch.setattr(hub, "FINISH_SECONDS", 0.05)
    monkeypatch.setattr(hub, "_MOST_WAITING", 2)
    log = make(tmp_path, "own")
    log.log({"a": 1.0}, 1)
    assert asked.wait(60)
    for step in range(2, 10):
        log.log({"a": 1.0}, step)
    log.finish()
    answer.set()
    assert len(lines(tmp_path)) == 9
    assert caplog.text.count("steps behind") == 1
    assert "is not done after 0.05 s and is left behind" in caplog.text


def test_finish_closes_every_logger_once_even_if_one_fails(tmp_path, monkeypatch, caplog):
    class Failing(Recorder):
        def finish(self):
            super().finish()
            raise OSError("the network is gone")

    register(monkeypatch, "failing", Failing)
    register(monkeypatch, "own", Recorder)
    log = make(tmp_path, "failing", "own")
    file, failing, own = log.loggers
    log.finish()
    log.finish()
    assert (failing.closed, own.closed) == (1, 1)
    assert file._file.closed
    assert "The logger failing did not close well" in caplog.text


def test_a_step_that_failed_is_in_the_file_and_at_no_service(tmp_path, monkeypatch):
    register(monkeypatch, "own", Recorder)
    log = make(tmp_path, "own")
    own = log.loggers[1]
    log.log({"a": 1.0}, 1)
    log.log({"timing_s/gen": 1.0}, 2, partial=True)
    log.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert own.steps == [1]


def test_lines_wait_for_a_disk_that_is_full_and_are_all_there_afterwards(tmp_path, caplog):
    log = make(tmp_path, "file")
    file = log.loggers[0]
    log.log({"a": 1.0}, 1)
    true_file = file._file
    with open("/dev/full", "wb", buffering=0) as full:
        file._file = full
        log.log({"a": 2.0}, 2)
        log.log({"a": 3.0}, 3)
        file._file = true_file
    log.log({"a": 4.0}, 4)
    log.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert caplog.text.count("cannot be written") == 1


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
    with pytest.raises(ConfigError, match=r"pip install 'burnish\[wandb\]'"):
        check_loggers(["wandb"])
