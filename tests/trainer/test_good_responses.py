"""Responses that scored well become conversations."""

import json

import pytest
from typer.testing import CliRunner

from burnish.cli.app import app
from burnish.trainer.offline.good_responses import take_responses
from burnish.utils.errors import ConfigError, DataError
from tests.render.fake_tokenizers import byte_tokenizer

PROMPT = [{"role": "user", "content": "1+1?"}]


def line(response="2", score=1.0, prompt=PROMPT, **columns):
    return {"prompt": prompt, "response": response, "score": score, "finish_reason": "stop", "valid": True, **columns}


@pytest.fixture
def file(tmp_path):
    rows = [
        line("two", 1.0, data_source="sums"),
        line("2", 2.0, data_source="sums"),
        line("2", 2.0),
        line("3", 0.0),
        line("two a", 1.0, finish_reason="length"),
        line("", 1.0),
        line("x", None, valid=False),
        line("4", 1.0, prompt="2+2?"),
    ]
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_good_responses_are_conversations_the_best_of_a_prompt_first(file):
    taken = take_responses(str(file), min_score=1.0)
    assert taken.rows == [
        {"messages": [*PROMPT, {"role": "assistant", "content": "2"}], "data_source": "sums", "score": 2.0},
        {"messages": [*PROMPT, {"role": "assistant", "content": "two"}], "data_source": "sums", "score": 1.0},
        {
            "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "data_source": "unknown",
            "score": 1.0,
        },
    ]
    assert taken.counts == {"taken": 3, "double": 1, "low": 1, "cut": 1, "empty": 1, "invalid": 1}
    assert taken.num_prompts == 2


def test_only_the_best_of_each_prompt_and_without_a_least_score(file):
    assert [row["score"] for row in take_responses(str(file), min_score=1.0, max_per_prompt=1).rows] == [2.0, 1.0]
    assert take_responses(str(file), min_score=None).counts["taken"] == 4


def test_what_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "q", "response": "r"}))
    with pytest.raises(DataError, match="there is no 'prompt' .--prompt-key"):
        take_responses(str(path), min_score=None)
    assert take_responses(str(path), min_score=None, prompt_key="question").counts == {"taken": 1}
    with pytest.raises(DataError, match="no response has a score.*burnish eval"):
        take_responses(str(path), min_score=1.0, prompt_key="question")
    with pytest.raises(ConfigError, match="no such file or folder"):
        take_responses(str(tmp_path / "nowhere"), min_score=None)
    with pytest.raises(ConfigError, match="no folder of a run"):
        take_responses(str(tmp_path), min_score=None)


@pytest.fixture
def run(tmp_path):
    """A run's folder with the rollouts of one step, its model's tokenizer and its data."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+{i}?"}) for i in range(3)))
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    config = {
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "train_max_samples": -1, "prompt_key": "prompt"},
        "trainer": {"rollout_data_dir": None},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    rows = [
        line("4<|im_end|>", 1.0, prompt="<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", uid="epoch0-2"),
        line(
            "7<|im_end|>",
            0.0,
            prompt="<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
            uid="epoch1-round2-1#1",
        ),
    ]
    (folder / "rollouts" / "1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_rollouts_of_a_run_get_the_prompts_of_its_data_and_lose_the_token_that_ended_them(run):
    taken = take_responses(str(run), min_score=1.0)
    assert taken.rows == [
        {
            "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "data_source": "unknown",
            "score": 1.0,
        }
    ]
    assert take_responses(str(run), min_score=None).counts["taken"] == 2


def test_a_run_whose_data_are_others_by_now_is_refused(run):
    (run.parent / "train.jsonl").write_text(json.dumps({"prompt": "other"}))
    with pytest.raises(DataError, match="epoch0-2 is not in the run's training data"):
        take_responses(str(run), min_score=1.0)


def test_the_command_writes_the_file_and_says_what_it_left_out(file, tmp_path):
    out = tmp_path / "deep" / "good.jsonl"
    ended = CliRunner().invoke(
        app, ["data", "sft-from-responses", str(file), "--min-score", "1", "--out", str(out)], terminal_width=400
    )
    assert ended.exit_code == 0, ended.output
    said = " ".join(ended.output.split())
    assert "3 conversations of 2 prompts" in said
    assert "1 scored too low, 1 were cut at the length limit" in said
    assert len(out.read_text().splitlines()) == 3
    none = CliRunner().invoke(
        app, ["data", "sft-from-responses", str(file), "--min-score", "9", "--out", str(tmp_path / "none.jsonl")]
    )
    assert none.exit_code != 0
    assert not (tmp_path / "none.jsonl").exists()
