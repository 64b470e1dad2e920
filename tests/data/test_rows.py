"""Columns of files as they come: mapped by the configuration, recognised, or refused with the key to set."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.config import DataConfig
from burnish.data import RLHFDataset
from burnish.render import render
from burnish.utils.errors import DataError
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "user", "content": "1+1="}]
WITH_TOOLS = byte_tokenizer("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def one(row, tokenizer=TOKENIZER, **config):
    return RLHFDataset.from_rows([row], tokenizer, DataConfig(**config))[0]


def test_raw_gsm8k_runs_by_naming_its_columns_and_its_source():
    row = {"question": "How many?", "answer": "2 and 3.\n#### 5"}
    got = one(row, prompt_key="question", answer_key="answer", default_data_source="openai/gsm8k")
    assert got["raw_prompt"] == [{"role": "user", "content": "How many?"}]
    assert got["reward_model"] == {"ground_truth": "2 and 3.\n#### 5"}
    assert got["data_source"] == "openai/gsm8k"
    assert not {"question", "answer"} & set(got)


def test_a_missing_column_lists_those_present_and_the_keys_to_set():
    with pytest.raises(DataError, match="present: question, answer.*data.prompt_key=question data.answer_key=answer"):
        one({"question": "q", "answer": "5"})
    with pytest.raises(DataError, match="no column 'solution', which data.answer_key .*data.answer_key=answer"):
        one({"question": "q", "answer": "5"}, prompt_key="question", answer_key="solution")


def test_the_named_answer_goes_before_any_other_ground_truth():
    row = {"prompt": "q", "reward_model": {"ground_truth": 1, "style": "rule"}, "final": 2}
    assert one(row, answer_key="final")["reward_model"] == {"ground_truth": 2, "style": "rule"}
    assert one(row)["reward_model"]["ground_truth"] == 1


@pytest.mark.parametrize(
    "prompt", [json.dumps(MESSAGES), " " + json.dumps(MESSAGES, indent=1), str(MESSAGES), MESSAGES[0]]
)
def test_messages_that_were_stored_as_text_are_messages(prompt):
    got = one({"prompt": prompt})
    assert got["raw_prompt"] == MESSAGES
    assert got["input_ids"].tolist() == render(MESSAGES, TOKENIZER)


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "1+1="', "[{'role': 'user' 'content': x}]"])
def test_broken_messages_are_never_trained_on_as_text(text):
    with pytest.raises(DataError, match="begins like a list of messages"):
        one({"prompt": text})


def test_a_prompt_about_an_image_is_not_trained_on_as_its_text():
    about = [{"role": "user", "content": "<image>Find x."}]
    with pytest.raises(DataError, match="has the mark <image> for what is in column 'images'"):
        one({"prompt": about, "images": ["a.png"]})
    for column in ({}, {"images": None}, {"images": []}):
        assert one({"prompt": about} | column)["raw_prompt"] == about
    assert one({"prompt": MESSAGES, "images": ["a.png"]})["images"] == ["a.png"]


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1}', "[role] content", '[{"a": "role"}]'])
def test_other_texts_in_brackets_stay_texts(text):
    assert one({"prompt": text})["raw_prompt"] == [{"role": "user", "content": text}]


def test_a_system_prompt_goes_before_prompts_that_have_none_and_is_measured():
    own = [{"role": "system", "content": "mine"}, *MESSAGES]
    system = {"role": "system", "content": "be brief"}
    for prompt in ("1+1=", MESSAGES):
        got = one({"prompt": prompt}, system_prompt="be brief")
        assert got["raw_prompt"] == [system, *MESSAGES]
        assert got["input_ids"].tolist() == render([system, *MESSAGES], TOKENIZER)
    assert one({"prompt": own}, system_prompt="be brief")["raw_prompt"] == own
    length = len(render(MESSAGES, TOKENIZER))
    with pytest.raises(DataError, match="more than data.max_prompt_length"):
        one({"prompt": MESSAGES}, system_prompt="be brief", max_prompt_length=length)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_are_rendered_and_measured(tools):
    got = one({"prompt": MESSAGES, "tools": tools}, WITH_TOOLS)
    assert got["tools"] == [TOOL]
    assert got["input_ids"].tolist() == render(MESSAGES, WITH_TOOLS, tools=[TOOL])
    length = len(render(MESSAGES, WITH_TOOLS))
    with pytest.raises(DataError, match="more than data.max_prompt_length"):
        one({"prompt": MESSAGES, "tools": tools}, WITH_TOOLS, max_prompt_length=length)


@pytest.mark.parametrize(
    "wrap", [lambda tool: [tool], lambda tool: {"tools": [{"class_name": "x", "tool_schema": tool}]}]
)
def test_tools_of_a_file_are_in_every_prompt(tmp_path, wrap, caplog):
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps(wrap(TOOL)))
    got = one({"prompt": MESSAGES}, WITH_TOOLS, tool_config_path=str(path))
    assert got["input_ids"].tolist() == render(MESSAGES, WITH_TOOLS, tools=[TOOL])
    assert "shows none of them" not in caplog.text
    one({"prompt": MESSAGES}, tool_config_path=str(path))
    assert "the chat template shows none of them" in caplog.text


@pytest.mark.parametrize("tools", ["{", 3, [3], {"a": 1}])
def test_tools_that_are_none_are_named(tools):
    with pytest.raises(DataError, match="column 'tools' is"):
        one({"prompt": MESSAGES, "tools": tools}, WITH_TOOLS)


def test_rows_of_other_files_leave_null_under_columns_that_are_not_theirs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "level": 1}\n')
    (tmp_path / "b.csv").write_text("prompt,topic\nb,maths\n")
    first, second = RLHFDataset([str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")], TOKENIZER, DataConfig())
    assert (first["level"], first["topic"]) == (1, None)
    assert (second["level"], second["topic"]) == (None, "maths")
    assert set(first) == set(second)


def test_tools_and_their_arguments_of_a_parquet_row_are_its_own(tmp_path):
    rows = []
    for name, value in (("add", 1), ("count", [2])):
        tool = {"type": "function", "function": {"name": name, "parameters": {name: {"type": "object"}}}}
        rows.append({"prompt": MESSAGES, "tools": [tool], "extra_info": {"tools_kwargs": {name: {"create": value}}}})
    rows[1]["extra_info"]["tools_kwargs"]["count"] = {"limit": 2}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for row, got in zip(rows, RLHFDataset(str(tmp_path / "a.parquet"), WITH_TOOLS, DataConfig()), strict=True):
        assert (got["tools"], got["extra_info"]) == (row["tools"], row["extra_info"])
        assert got["input_ids"].tolist() == render(MESSAGES, WITH_TOOLS, tools=row["tools"])
