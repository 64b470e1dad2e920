"""`burnish data`: files of training data."""

import errno
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from burnish.cli.app import app
from burnish.reward.compute_score import default_compute_score, reference_solution

pytest.importorskip("reasoning_gym")


def run(*args):
    return CliRunner().invoke(app, ["data", *args])


def rows_of(folder, split):
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def test_reasoning_gym_writes_rows_that_its_own_verifiers_score(tmp_path):
    tasks = ["--task", "chain_sum", "--task", "graph_color"]
    ended = run("reasoning_gym", *tasks, "--size", "20", "--test-size", "5", "--seed", "3", "--out", str(tmp_path))
    assert ended.exit_code == 0, ended.output
    assert "train.parquet: 40 rows" in ended.output
    train, test = rows_of(tmp_path, "train"), rows_of(tmp_path, "test")
    assert [len(train), len(test)] == [40, 10]
    assert {row["data_source"] for row in train} == {"reasoning_gym/chain_sum", "reasoning_gym/graph_color"}
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in test}
    for row in [*train[:3], *test[:3]]:
        arguments = row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"]
        assert default_compute_score(arguments[0], reference_solution(*arguments), *arguments[1:])["score"] == 1
        assert default_compute_score(arguments[0], "<answer>x</answer>", *arguments[1:])["score"] < 0.1
    assert reference_solution("reasoning_gym/graph_color", "", train[-1]["extra_info"]) is None
    assert train[0]["prompt"][0]["content"].endswith("in <answer> </answer> tags.")


def test_a_seed_gives_the_same_rows_again_and_parameters_reach_the_task(tmp_path):
    options = [
        "reasoning_gym",
        "--task",
        "chain_sum",
        "--size",
        "4",
        "--test-size",
        "2",
        "--set",
        "max_terms=2",
        "--instruction",
        "",
    ]
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        ended = run(*options, "--seed", seed, "--out", str(tmp_path / folder))
        assert ended.exit_code == 0, ended.output
    assert rows_of(tmp_path / "a", "train") == rows_of(tmp_path / "b", "train")
    assert rows_of(tmp_path / "a", "test") == rows_of(tmp_path / "b", "test")
    assert rows_of(tmp_path / "a", "train") != rows_of(tmp_path / "c", "train")
    assert {row["extra_info"]["entry"].count('"num_terms": 2') for row in rows_of(tmp_path / "a", "train")} == {1}
    assert all(row["prompt"][0]["content"].endswith("=") for row in rows_of(tmp_path / "a", "train"))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--task", "nothing"], "no task 'nothing'. Tasks: ab, acre"),
        ([], "--task names what to make rows of"),
        (["--task", "chain_sum", "--set", "max_terms"], "--set max_terms: a parameter of the task is set as key=value"),
        (["--task", "chain_sum", "--set", "foo=1"], "unexpected keyword argument 'foo'"),
        (["--task", "chain_sum", "--set", "min_terms=5", "--set", "max_terms=2"], "max_terms must be"),
        (
            [*["--task", "chain_sum", "--size", "500", "--set", "max_terms=2", "--set", "max_digits=1"]],
            "Give a smaller --size or --test-size",
        ),
    ],
)
def test_what_cannot_be_made_ends_in_a_sentence_and_writes_nothing(tmp_path, capfd, options, what):
    ended = run("reasoning_gym", *options, "--out", str(tmp_path))
    assert ended.exit_code == 2
    assert what in " ".join(f"{ended.output} {capfd.readouterr().err}".split())
    assert not list(tmp_path.iterdir())


def test_the_tasks_and_the_commands_are_listed():
    assert {"chain_sum", "zebra_puzzles"} <= set(run("reasoning_gym", "--list").output.split())
    assert "composite" not in run("reasoning_gym", "--list").output.split()
    assert "reasoning_gym" in run("--help").output


def test_files_that_were_there_stay_whole_until_the_new_ones_are(tmp_path, monkeypatch):
    once = ["reasoning_gym", "--task", "chain_sum", "--size", "2", "--test-size", "1", "--out", str(tmp_path)]
    assert run(*once).exit_code == 0

    def write_a_part(table, where):
        Path(where).write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", write_a_part)
    assert run(*once).exit_code != 0
    assert len(rows_of(tmp_path, "train")) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
