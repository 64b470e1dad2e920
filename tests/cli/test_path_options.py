"""Options that name what is written: a path that cannot be is a sentence with the option, before anything else is done."""

import pytest
from typer.testing import CliRunner

from burnish.cli.app import app


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["export", "{model}", "--out"], "--out"),
        (["generate", "{model}", "--prompt", "1+1=", "--out"], "--out"),
        (["eval", "{model}", "--data", "{rows}", "--out"], "--out"),
        (["score", "--data", "{rows}", "--out"], "--out"),
        (["report", "{run}", "--out"], "--out"),
        (["data", "reasoning_gym", "--task", "chain_sum", "--out"], "--out"),
        (["data", "sft-from-responses", "{rows}", "--out"], "--out"),
        (["model", "smollm2"], "OUT"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_home_of_nobody_is_refused_where_something_is_to_be_written(
    words, option, tiny_model_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text('{"prompt": "1+1=", "response": "2", "ground_truth": "2", "data_source": "openai/gsm8k"}\n')
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    words = [word.format(model=tiny_model_path, rows=rows, run=run) for word in words]
    result = CliRunner().invoke(app, [*words, "~no_such_user/x.jsonl"])
    assert result.exit_code == 2, result.output
    said = f"ConfigError: {option}=~no_such_user/x.jsonl: there is no user no_such_user on this machine"
    assert said in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run"]
