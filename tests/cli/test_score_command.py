"""`burnish score`: stored responses in, scored rows and a summary out."""

import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.cli.score import ScoreOptions, run_score
from burnish.utils.errors import ConfigError, DataError, RewardError

FUNCTION = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash": os._exit(1)
    if solution_str == "hang": time.sleep(60)
    if solution_str == "nan": return float("nan")
    if solution_str == "none": return None
    return {"score": float(solution_str == ground_truth) + extra_info.get("bonus", 0), "pred": solution_str}
"""


@pytest.fixture
def reward(tmp_path: Path) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(FUNCTION)
    return f"{path}:compute_score"


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def score(capsys: pytest.CaptureFixture[str], *overrides: str, **options: object) -> tuple[int, dict]:
    chosen = ScoreOptions(overrides=["reward.num_workers=2", *overrides], **options)  # type: ignore[arg-type]
    status = run_score(chosen, as_json=True)
    return status, json.loads(capsys.readouterr().out)


def test_a_dump_is_scored_and_summed_up(tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Three responses to each of two prompts, as `trainer.rollout_data_dir` stores them.
    texts = {"a": ["1", "1", "2"], "b": ["2", "3", "3"]}
    rows = [
        {"step": 1, "uid": uid, "data_source": source, "prompt": "?", "response": text, "ground_truth": "1", "score": 9}
        for source, (uid, responses) in zip(("easy", "hard"), texts.items(), strict=True)
        for text in responses
    ]
    status, summary = score(capsys, data=[write(tmp_path / "1.jsonl", rows)], reward=reward)
    assert status == 0
    assert (summary["num_responses"], summary["num_prompts"], summary["num_scored"]) == (6, 2, 6)
    assert summary["mean"] == pytest.approx(2 / 6)
    assert (summary["best@3"], summary["maj@3"], summary["pass@3"]) == (0.5, 0.5, 0.5)
    assert summary["pass@1"] == pytest.approx(1 / 3)
    assert summary["pass@2"] == pytest.approx(0.5)
    assert summary["data_sources"]["easy"]["mean"] == pytest.approx(2 / 3)
    assert summary["data_sources"]["hard"]["maj@3"] == 0.0
    scored = [json.loads(line) for line in Path(summary["out"]).read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert scored[0] == rows[0] | {"score": 1.0, "valid": True, "pred": "1"}


def test_failures_are_counted_and_cost_their_row_only(
    tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["x", "crash", "hang", "nan", "none", "x"]
    data = [write(tmp_path / "r.jsonl", [{"response": text, "ground_truth": "x"} for text in texts])]
    status, summary = score(capsys, "reward.timeout=1", data=data, reward=reward)
    assert status == 1
    assert [summary[f"num_{reason}"] for reason in ("error", "timeout", "non_finite", "abstain")] == [1, 1, 1, 1]
    assert (summary["num_scored"], summary["mean"]) == (2, 1.0)
    assert "row 1 (line 2): ProcessDied" in summary["first_error"]
    scored = [json.loads(line) for line in Path(summary["out"]).read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, None, None, None, None, 1.0]
    assert scored[2]["score_error"].startswith("timeout")
    data = [write(tmp_path / "s.jsonl", [{"response": "x"}, {"response": "crash"}])]
    overrides = ["reward.on_error=raise", "reward.num_workers=1"]
    with pytest.raises(RewardError, match=r"row 1 \(line 2\): the reward function failed"):
        run_score(ScoreOptions(data=data, reward=reward, overrides=overrides), as_json=True)


def test_a_list_of_responses_is_one_prompt_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table(
        {
            "data_source": ["openai/gsm8k"] * 2,
            "reward_model": [{"ground_truth": "72"}, {"ground_truth": "5"}],
            "answers": [["#### 72", "#### 7"], ["#### 5", "#### 5"]],
        }
    )
    pq.write_table(table, tmp_path / "r.parquet")
    out = tmp_path / "made" / "scored.jsonl"
    status, summary = score(capsys, data=[str(tmp_path / "*.parquet")], response_key="answers", out=str(out))
    assert (status, summary["num_prompts"], summary["mean"], summary["best@2"]) == (0, 2, 0.75, 1.0)
    assert [json.loads(line)["answers"] for line in out.read_text().splitlines()] == [
        "#### 72",
        "#### 7",
        "#### 5",
        "#### 5",
    ]


def test_wrong_requests_are_said(tmp_path: Path, reward: str) -> None:
    data = write(tmp_path / "r.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match="--response-key"):
        run_score(ScoreOptions(data=[data]), as_json=True)
    with pytest.raises(ConfigError, match="my_reward.py:compute_score"):
        run_score(ScoreOptions(data=[data], reward="my_reward.py"), as_json=True)
    with pytest.raises(ConfigError, match="one of the files"):
        run_score(ScoreOptions(data=[data], out=data, response_key="text"), as_json=True)
    with pytest.raises(DataError, match="text, or a list"):
        run_score(ScoreOptions(data=[write(tmp_path / "n.jsonl", [{"response": 3}])]), as_json=True)


@pytest.mark.parametrize(("out", "said"), [("folder", "this is a folder"), ("file/x.jsonl", "a file in its place")])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_scored(tmp_path, monkeypatch, out, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    data = write(tmp_path / "r.jsonl", [{"response": "1"}])
    monkeypatch.setattr("burnish.cli.score.reward_function", lambda config: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=said):
        run_score(ScoreOptions(data=[data], out=str(tmp_path / out)), as_json=True)


def test_a_disk_that_is_full_costs_neither_the_numbers_nor_the_file_that_was_there(
    tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scored.jsonl"
    out.write_text('{"from": "before"}\n')
    lines: list[object] = []

    def encode(row: object) -> bytes:
        if lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines.append(row)
        return b"{}\n"

    monkeypatch.setattr("burnish.utils.json_lines.encode_line", encode)
    rows = [{"response": "1", "ground_truth": truth} for truth in "12"]
    options = ScoreOptions(data=[write(tmp_path / "r.jsonl", rows)], reward=reward, out=str(out))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        run_score(options, as_json=True)
    assert json.loads(capsys.readouterr().out)["mean"] == 0.5
    assert out.read_text() == '{"from": "before"}\n'
    assert len(list(tmp_path.glob("*scored*"))) == 1


def test_a_place_of_its_own_choice_that_is_read_too_is_not_called_an_option(tmp_path):
    from burnish.cli.score import _out_file
    from burnish.utils.errors import ConfigError

    files = [tmp_path / "1.jsonl", tmp_path / "1.scored.jsonl"]
    with pytest.raises(ConfigError, match="where the scored rows would go: this is one of the files") as refused:
        _out_file(None, files)
    assert "--out=" not in str(refused.value)
