"""What the report reads of a run's folder, whole, partial, odd or absent."""

import json
import math
import os
import shutil
import time
from pathlib import Path

import pytest

from burnish.report.payload import describe
from burnish.report.read import RunFolder, open_runs
from burnish.report.series import MOST_POINTS, Series
from burnish.report.tail import Tail
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import redact
from tests.report.made_runs import made_run


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_tail_reads_what_is_appended_once_and_waits_for_the_end_of_a_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"step": 1})
    tail = Tail(path)
    assert tail.refresh()
    assert not tail.refresh()
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert tail.refresh()
    assert [row["step"] for row in tail.rows] == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    tail.refresh()
    assert [row["step"] for row in tail.rows] == [1, 2, 3]
    assert tail.num_broken == 0


def test_a_tail_begins_anew_where_the_file_was_cut_replaced_or_removed(tmp_path):
    path = write(tmp_path / "a.jsonl", {"step": 1}, {"step": 2})
    tail = Tail(path)
    tail.refresh()
    write(path, {"step": 1})
    assert tail.refresh()
    assert [row["step"] for row in tail.rows] == [1]
    other = write(tmp_path / "b.jsonl", {"step": 7}, {"step": 8})
    os.replace(other, path)
    tail.refresh()
    assert [row["step"] for row in tail.rows] == [7, 8]
    # Longer, under the same number of the file system, and different from the start.
    write(path, {"step": 20}, {"step": 21}, {"step": 22})
    tail.refresh()
    assert [row["step"] for row in tail.rows] == [20, 21, 22]
    path.unlink()
    assert tail.refresh()
    assert tail.rows == []


def test_a_file_that_is_moved_away_while_it_is_read_is_no_error(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", {"step": 1})
    tail = Tail(path)
    open_file = Path.open

    def open_and_move(self, mode):
        file = open_file(self, mode)
        os.replace(path, tmp_path / "moved.jsonl")
        return file

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "open", open_and_move)
        assert tail.refresh()
    assert [row["step"] for row in tail.rows] == [1]
    assert tail.refresh()
    assert tail.rows == []


def test_lines_that_are_no_objects_are_counted_and_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1]\n\n\xff\xfe\n{"step": 2}\n')
    tail = Tail(path)
    tail.refresh()
    assert ([row["step"] for row in tail.rows], tail.num_broken) == ([1, 2], 3)


def test_series_have_a_column_for_every_metric_over_all_steps():
    series = Series(
        [{"step": 2, "a": 1.0}, {"step": 1, "b": math.nan, "a": 3}, {"step": 2, "b": math.inf, "c": "text", "d": True}]
    )
    assert series.steps == [1, 2]
    assert series.columns == {"a": [3, 1.0], "b": [None, None]}
    assert series.non_finite == {"b": [1, 2]}
    assert series.num_odd == 2


def test_a_later_row_of_a_step_counts_name_by_name():
    series = Series([{"step": 1, "a": 1.0, "b": 2.0}, {"step": 1, "a": 5.0}])
    assert series.columns == {"a": [5.0], "b": [2.0]}


def test_a_long_run_keeps_its_spikes():
    values = [0.0] * 7_001
    values[3_234], values[3_240] = 99.0, -99.0
    steps, columns = Series([{"step": step, "a": value} for step, value in enumerate(values)]).thinned()
    assert len(steps) == len(columns["a"]) <= MOST_POINTS
    assert steps == sorted(steps)
    assert (max(columns["a"]), min(columns["a"])) == (99, -99)


def test_the_axes_of_a_long_run_count_every_step():
    # A stretch whose seconds are all alike is one point in its curve.
    series = Series([{"step": step, "timing_s/step": 2.0} for step in range(1, 7_002)])
    totals = series.totals("timing_s/step")
    assert len(totals) == len(series.thinned()[0])
    assert (totals[0], totals[-1]) == (2.0, 2.0 * 7_001)
    assert series.totals("perf/total_num_tokens") == [0.0] * len(totals)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{{"step": 1, "a": 1{}}}\n{{"step": 1{}, "a": 1}}\n'.format("0" * 400, "0" * 400)),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("heartbeat.json", '{"time": "x", "stage": {"a": 1}, "workers": [1], "total_steps": "many"}'),
        ("events.jsonl", '{"time": "abc", "kind": "end", "status": [1]}\n{"time": 5, "kind": ["a"]}\n'),
        ("config_origin.json", '{"a.b": {"value": 1, "origin": 5}}'),
        ("rollouts/1.jsonl", '{"prompt": ' + "[" * 100_000 + "\n"),
        ("rollouts/1.jsonl", '{{"prompt": "p", "score": 1{}, "num_tokens": 1{}}}\n'.format("0" * 400, "0" * 400)),
    ],
)
def test_odd_values_are_shown_or_left_out(tmp_path, file, text):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    (run,) = open_runs([str(tmp_path)])
    described = describe(run, {})
    assert described["status"]["state"] in ("unknown", "failed")
    assert all(isinstance(origin, str) for _, origin in described["config"].values())


def test_recent_means_spread_the_seconds_of_rare_stages_over_all_steps():
    rows = [{"step": step, "timing_s/step": 2.0, "a": 1.0} for step in range(1, 11)]
    rows[4] |= {"timing_s/testing": 5.0, "val": 0.5}
    means = Series([{"step": 0, "val": 0.1}, *rows]).recent_means(10)
    assert means["timing_s/testing"] == 0.5
    assert means["timing_s/step"] == 2.0
    assert means["val"] == 0.5


def test_a_whole_run_is_described(tmp_path):
    run = RunFolder(made_run(tmp_path / "run"))
    page = describe(run, {})
    assert page["status"]["state"] == "ended"
    assert page["status"]["step"] == 12
    assert page["config"]["data.train_files"][1] == "command line"
    assert page["config"]["actor_rollout_ref.actor.optim.lr"][1] == "recipe demo"
    assert set(page["stages"]["seconds"]) == {"gen", "reward", "update_actor", "other", "testing"}
    assert page["stages"]["seconds"]["other"][0] == pytest.approx(0.2)
    assert page["bottleneck"][0]["stage"] in page["stages"]["seconds"]
    assert {event["kind"] for event in page["events"]} == {"start", "checkpoint", "end"}
    assert sum(page["histograms"]["train"]["rows"]) == 12 * 16
    assert all(sum(column) == 16 for column in page["histograms"]["train"]["score"]["counts"])


def test_an_empty_and_a_broken_folder_are_told_of_and_shown(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "a": NaN}\n{"step"')
    (run / "config.yaml").write_text("trainer: [unclosed")
    (run / "config_origin.json").write_text("[]")
    (run / "heartbeat.json").write_text("{")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "1.jsonl").write_text('{"prompt": ["odd"], "score": NaN}\nbroken\n')
    (run / "rollouts" / "1.tokens.parquet").write_text("no parquet")
    page = describe(open_runs([str(run)])[0], {})
    assert page["status"]["state"] == "unknown"
    notes = " ".join(page["notes"])
    assert "config.yaml cannot be read" in notes
    assert "train rollouts: 1 lines could not be read" in notes
    assert page["rollouts"]["train"]["steps"][0]["total"] == 1


def test_what_is_listed_and_is_not_there_any_more_is_passed_over(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for folder in ("rollouts", "profile"):
        (run / folder).mkdir(parents=True)
    write(run / "metrics.jsonl", {"step": 1})
    write(run / "rollouts" / "1.jsonl", {"prompt": "p", "response": "r", "score": 1.0})
    (run / "profile" / "trace.json").write_text("{}")
    # A link that leads nowhere stands for every file that goes between two looks at it.
    (run / "rollouts" / "2.jsonl").symlink_to(tmp_path / "nowhere")
    read = open_runs([str(run)])[0]
    assert list(read.dumps["train"].index) == [1]
    (run / "profile" / "gone.json").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(Path, "is_file", Path.is_symlink)
    assert [file["path"] for file in read.files()] == ["profile/gone.json"]


def test_a_run_that_fell_silent_is_not_called_running(tmp_path):
    folder = made_run(tmp_path / "run", num_steps=2, validation=False)
    write(folder / "events.jsonl", {"time": 1.0, "step": 0, "kind": "start", "message": "go"})
    beat = {"time": time.time(), "pid": 1, "step": 2, "total_steps": 9, "stage": "gen", "workers": {}}
    write(folder / "heartbeat.json", beat)
    assert RunFolder(folder).status()["state"] == "running"
    write(folder / "heartbeat.json", beat | {"time": time.time() - 4000})
    status = RunFolder(folder).status()
    assert status["state"] == "silent"
    assert "67 minutes" in status["text"]


@pytest.mark.parametrize(
    ("status", "beat", "state"),
    [
        (0, {}, "ended"),
        (143, {}, "stopped"),
        (1, {}, "failed"),
        (1, {"stage": "ended"}, "failed"),
        # Started again after its end.
        (0, {"stage": "gen"}, "running"),
    ],
)
def test_how_a_run_ended_is_told_by_its_status(tmp_path, status, beat, state):
    folder = made_run(tmp_path / "run", num_steps=1, validation=False)
    end = {"time": 1000.0, "step": 1, "kind": "end", "message": "So it ended.", "status": status}
    write(folder / "events.jsonl", end)
    write(folder / "heartbeat.json", {"time": time.time() if beat else 1001.0} | beat)
    assert RunFolder(folder).status()["state"] == state


def test_dumps_are_found_where_the_run_was_moved_to(tmp_path):
    away = tmp_path / "elsewhere" / "dumps"
    folder = made_run(tmp_path / "run", num_steps=2, overrides=(f"trainer.rollout_data_dir={away}",))
    assert RunFolder(folder).dumps["train"].folder == folder / "rollouts"
    away.parent.mkdir()
    shutil.copytree(folder / "rollouts", away)
    assert RunFolder(folder).dumps["train"].folder == away


def test_secrets_stay_out_of_the_page(tmp_path):
    folder = made_run(tmp_path / "run", num_steps=2)
    (folder / "config_origin.json").unlink()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text + "mine:\n  api_key: sk-0123456789abcdef\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "warning", "message": "token=hunter2hunter2 is wrong"}) + "\n")
    page = json.dumps(describe(RunFolder(folder), {}))
    assert "sk-0123456789abcdef" not in page
    assert "hunter2hunter2" not in page


def test_an_event_is_searched_for_secrets_once_however_often_the_run_is_looked_at(tmp_path, monkeypatch):
    searched = []

    def noted(value, name=""):
        searched.extend([value] if isinstance(value, dict) and "kind" in value else [])
        return redact(value, name)

    monkeypatch.setattr("burnish.report.read.redact", noted)
    folder = made_run(tmp_path / "run", num_steps=12)
    run = RunFolder(folder)
    for _ in range(3):
        describe(run, {})
    num_events = len((folder / "events.jsonl").read_text().splitlines())
    assert len(searched) == num_events > 0
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "warning", "message": "one more"}) + "\n")
    run.refresh()
    assert len(searched) == num_events + 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "there is no such folder"),
        ("outer", "There are runs below it: .*outer/run"),
        ("empty", "is no run's folder"),
    ],
)
def test_a_folder_that_is_no_runs_is_refused(tmp_path, name, says):
    made_run(tmp_path / "outer" / "run", num_steps=2) if name == "outer" else (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says):
        open_runs([str(tmp_path / name)])


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [made_run(tmp_path / place / "run", num_steps=1, validation=False) for place in ("a", "b")]
    assert [run.name for run in open_runs([str(folder) for folder in folders])] == ["a/run", "b/run"]
    with pytest.raises(ConfigError, match="named twice"):
        open_runs([str(folders[0]), f"{folders[0]}/"])
