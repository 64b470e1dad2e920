"""`burnish export`, `burnish generate` and `burnish eval` as they are typed."""

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from burnish.cli.app import app
from burnish.cli.evaluate import parse_sizes, run_eval
from burnish.cli.generate import check_out
from burnish.cli.model_commands import _is_model
from burnish.trainer.offline.numbers import REASONS
from burnish.utils.errors import ConfigError


def burnish(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def data(tmp_path: Path, tiny_data_path: Path) -> str:
    """Three rows of the tiny model's test data."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join((tiny_data_path / "test.jsonl").read_text().splitlines()[:3]) + "\n")
    return str(path)


def test_export_says_what_it_wrote_and_refuses_to_write_over_it(tiny_model_path: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = burnish("export", tiny_model_path, "--out", out, "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["dtype"], facts["num_parameters"], facts["out"]) == ("bfloat16", 821120, out)
    again = burnish("export", tiny_model_path, "--out", out)
    assert again.exit_code == 2
    assert "ConfigError" in again.stderr
    assert "--overwrite" in again.stderr
    replaced = burnish("export", tiny_model_path, "--out", out, "--overwrite")
    assert "LlamaForCausalLM, model, 821,120 parameters in float32, head tied" in replaced.stdout
    assert burnish("export", tiny_model_path, "--out", out, "--part", "reference").exit_code == 2


def test_generate_prints_responses_or_writes_them(tiny_model_path: str, tmp_path: Path, data: str) -> None:
    shown = burnish("generate", tiny_model_path, "--prompt", "3+3=", "-n", "2", "--temperature", "0", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines() == ["3+3=", "[0] 6", "[1] 6"]
    out = tmp_path / "made" / "responses.jsonl"
    common = ("generate", tiny_model_path, "--data", data, "--device", "cpu", "--max-tokens", "4")
    written = burnish(*common, "--out", str(out))
    assert written.exit_code == 0, written.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 3
    piped = burnish(*common, "--json")
    assert [json.loads(line) for line in piped.stdout.splitlines()] == lines
    # Nothing is left of an attempt that fails, and what was there stays.
    failed = burnish(*common, "--out", str(out), "actor_rollout_ref.rollout.val_kwargs.stop_token_ids=[100000]")
    assert failed.exit_code == 1, failed.output
    assert len(out.read_text().splitlines()) == 3
    assert [path.name for path in out.parent.iterdir()] == ["responses.jsonl"]


@pytest.mark.slow
def test_what_generate_wrote_is_data_for_score(tiny_model_path: str, tmp_path: Path, data: str) -> None:
    out, scored = tmp_path / "responses.jsonl", tmp_path / "scored.jsonl"
    ask = ("--data", data, "--device", "cpu", "--max-tokens", "4")
    assert burnish("generate", tiny_model_path, *ask, "--out", str(out)).exit_code == 0
    score = burnish("score", "--data", str(out), "--out", str(scored), "--json", "reward.num_workers=0")
    measured = burnish("eval", tiny_model_path, "reward.num_workers=0", *ask, "--json")
    assert measured.exit_code == 0, measured.output
    (model,) = json.loads(measured.stdout)["models"]
    assert model["metrics"]["mean@1"]["value"] == json.loads(score.stdout)["mean"]


def test_eval_shows_a_table_and_fails_where_the_reward_function_does(
    tiny_model_path: str, tmp_path: Path, data: str
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if extra_info['index'] else 1 / 0\n"
    )
    out = tmp_path / "rows.jsonl"
    ask = ("--data", data, "--device", "cpu", "--max-tokens", "4", "-n", "2", "-k", "1,2")
    words = ("eval", tiny_model_path, tiny_model_path, "reward.num_workers=0")
    result = burnish(*words, "--reward", f"{reward}:score", *ask, "--out", str(out))
    assert result.exit_code == 1, result.output
    assert "3 prompts, 2 responses to each, not scored: 2 error" in result.stdout
    assert "pass@2" in result.stdout
    assert "0.6667 [" in result.stdout
    assert "on the same 3 prompts" in result.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["score"] for row in rows] == [None, None, 1.0, 1.0, 1.0, 1.0] * 2
    assert {row["model"] for row in rows} == {tiny_model_path}


def test_words_of_the_command_line_are_read_or_refused(tmp_path: Path, data: str) -> None:
    assert parse_sizes(["1,4", "8"]) == [1, 4, 8]
    assert parse_sizes(None) is None
    for text in ("0", "two", "1,,2", "-1"):
        with pytest.raises(ConfigError, match="write numbers of at least 1"):
            parse_sizes([text])
    folder = tmp_path / "lr=1e-6"
    folder.mkdir()
    assert [_is_model(word) for word in (str(folder), "org/name", "data.seed=1", "~data.seed")] == [
        True,
        True,
        False,
        False,
    ]
    refused = {
        data: "files that are read",
        str(tmp_path): "a folder",
        "responses.csv": "lines of JSON",
        f"{data}/responses.jsonl": "a file in its place",
    }
    for out, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            check_out(out, [data])
    # A folder and a pattern name their files, too; a new file is none of them.
    for source in (str(Path(data).parent), str(Path(data).parent / "*.jsonl")):
        with pytest.raises(ConfigError, match="files that are read"):
            check_out(data, [source])
        assert check_out(str(Path(data).parent / "new.jsonl"), [source]).name == "new.jsonl"


def test_numbers_are_told_also_where_the_disk_does_not_take_the_responses(tmp_path, data, capsys, monkeypatch):
    def rows():
        yield {"response": "1"}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    result = {"models": [{f"num_{reason}": 0 for reason in REASONS}], "mean": 0.5}
    monkeypatch.setattr("burnish.cli.evaluate.evaluate", lambda options, on_progress: (result, rows()))
    options = SimpleNamespace(ask=SimpleNamespace(data=[data]))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        run_eval(options, str(tmp_path / "out.jsonl"), as_json=True)
    assert json.loads(capsys.readouterr().out)["mean"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(("page", "commands"), [("export", ["export"]), ("evaluate", ["generate", "eval"])])
def test_the_page_has_every_option_and_no_other(page: str, commands: list[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / f"{page}.md").read_text()
    described = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(re.findall(r"`(-[^`]*)`", text))))
    by_name = get_command(app).commands  # type: ignore[attr-defined]
    options = {
        name for command in commands for option in by_name[command].params for name in option.opts if name[0] == "-"
    }
    assert options - described == set(), "not on the page"
    assert described - options == set(), "on the page alone"
