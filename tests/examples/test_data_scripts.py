"""The scripts of examples/data, on small copies of what they read."""

import json
import sys
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.reward.compute_score import default_compute_score, reference_solution
from examples.data import countdown, dapo_math, gsm8k, math

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def run(module, monkeypatch, capsys, *args):
    """Runs a script in this process; returns its exit status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, args)])
    status = 0
    try:
        module.main()
    except SystemExit as stop:
        status = stop.code or 0
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def written(folder, split):
    table = pq.read_table(folder / f"{split}.parquet")
    assert table.column_names == COLUMNS
    rows = table.to_pylist()
    for row in rows:
        assert row["extra_info"]["split"] == split
        arguments = row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"]
        result = default_compute_score(arguments[0], reference_solution(*arguments), *arguments[1:])
        assert (result["score"] if isinstance(result, dict) else result) == 1
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    return rows


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_gsm8k_takes_the_number_after_the_mark(tmp_path, monkeypatch, capsys):
    rows = [{"question": f"{i} + 1000?", "answer": f"It is <<{i}+1000>>.\n#### 1,00{i}"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    test = jsonl(tmp_path / "test.jsonl", rows[:1])
    status, printed = run(
        gsm8k, monkeypatch, capsys, "--train", tmp_path / "train.parquet", "--test", test, "--out", tmp_path / "out"
    )
    assert status == 0, printed
    assert "3 rows" in printed
    made = written(tmp_path / "out", "train")
    assert made[2]["reward_model"] == {"style": "rule", "ground_truth": "1002"}
    assert made[2]["data_source"] == "openai/gsm8k"
    assert made[2]["prompt"] == [{"role": "user", "content": f"2 + 1000? {gsm8k.INSTRUCTION}"}]
    assert len(written(tmp_path / "out", "test")) == 1


def test_math_takes_the_last_box_or_the_answer(tmp_path, monkeypatch, capsys):
    train = jsonl(
        tmp_path / "a.jsonl",
        [{"problem": "?", "solution": r"$\boxed{1}$ no $\boxed{\frac{1}{2}}$", "level": "Level 1", "type": "Algebra"}],
    )
    test = jsonl(
        tmp_path / "b.jsonl",
        [{"problem": "?", "solution": r"so $\boxed{x}$", "answer": "x", "subject": "Algebra", "level": 1}],
    )
    status, printed = run(math, monkeypatch, capsys, "--train", train, "--test", test, "--out", tmp_path)
    assert status == 0, printed
    assert written(tmp_path, "train")[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert written(tmp_path, "test")[0]["extra_info"]["subject"] == "Algebra"


def test_dapo_math_keeps_each_problem_once_and_its_messages(tmp_path, monkeypatch, capsys):
    row = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "data_source": "math_dapo",
    }
    other = {"prompt": [{"role": "user", "content": "1+2?"}], "reward_model": {"ground_truth": "3", "style": "rule"}}
    train = jsonl(tmp_path / "a.jsonl", [row, row, other, row])
    test = jsonl(tmp_path / "b.jsonl", [{"problem": "x?", "answer": 204}])
    status, printed = run(dapo_math, monkeypatch, capsys, "--train", train, "--test", test, "--out", tmp_path)
    assert status == 0, printed
    made = written(tmp_path, "train")
    assert [entry["prompt"] for entry in made] == [row["prompt"], other["prompt"]]
    [tested] = written(tmp_path, "test")
    assert (tested["data_source"], tested["reward_model"]["ground_truth"]) == ("aime_2024", "204")
    assert tested["prompt"][0]["content"] == dapo_math.PROMPT.format("x?")


def test_countdown_makes_games_that_have_solutions_and_differ(tmp_path, monkeypatch, capsys):
    status, printed = run(countdown, monkeypatch, capsys, "--train", 60, "--test", 20, "--out", tmp_path)
    assert status == 0, printed
    games = [row["reward_model"]["ground_truth"] for split in ("train", "test") for row in written(tmp_path, split)]
    assert len({(tuple(sorted(game["numbers"])), game["target"]) for game in games}) == 80
    assert all(len(game["numbers"]) in (3, 4) and game["target"] not in game["numbers"] for game in games)
    assert countdown.draw_games(5, seed=1) == countdown.draw_games(5, seed=1) != countdown.draw_games(5, seed=2)
    assert Fraction(games[0]["target"]) >= 1


@pytest.mark.parametrize(
    ("module", "row", "what"),
    [
        (gsm8k, {"question": "?", "answer": "72"}, "row 1 (line 2): column answer: '72' has no #### before its answer"),
        (gsm8k, {"prompt": "?"}, "row 1 (line 2): there is no column question; there is: prompt"),
        (math, {"problem": "?", "solution": "x"}, "row 1 (line 2): column solution: 'x' has no \\boxed answer"),
        (dapo_math, {"prompt": "?"}, "row 1 (line 2): there is no column answer or Answer or solution"),
        (
            dapo_math,
            {"prompt": "first", "answer": "8"},
            "row 1 (line 2): the answer is '8', but the same problem had '7' before",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, monkeypatch, capsys, module, row, what):
    first = {
        gsm8k: {"question": "?", "answer": "#### 7"},
        math: {"problem": "?", "solution": r"\boxed{7}"},
        dapo_math: {"prompt": "first", "answer": "7"},
    }[module]
    file = jsonl(tmp_path / "a.jsonl", [first, row])
    status, printed = run(module, monkeypatch, capsys, "--train", file, "--test", file, "--out", tmp_path / "out")
    assert status == 2
    assert what in printed


def test_a_file_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    status, printed = run(gsm8k, monkeypatch, capsys, "--train", "no.parquet", "--out", tmp_path)
    assert status == 2
    assert "no.parquet: there is no such file" in printed
    assert not list(tmp_path.iterdir())


def test_a_wrong_test_set_leaves_no_training_set_behind(tmp_path, monkeypatch, capsys):
    train = jsonl(tmp_path / "a.jsonl", [{"question": "?", "answer": "#### 7"}])
    status, _ = run(gsm8k, monkeypatch, capsys, "--train", train, "--test", "no.parquet", "--out", tmp_path / "out")
    assert status == 2
    assert not (tmp_path / "out").exists()
