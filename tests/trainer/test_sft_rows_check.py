"""What ``burnish check --sft`` says of the rows."""

import json

import pytest
from transformers import LlamaConfig

from burnish.config import SFTDataConfig, SFTTrainerConfig
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.sft_rows import check_sft_rows
from tests.render.chat_templates import tokenizer_with
from tests.render.fake_tokenizers import CHATML

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def check(tmp_path, rows, model=None, tokenizer=None, **data):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Findings()
    config = SFTTrainerConfig(data=SFTDataConfig(train_files=[str(file)], **data))
    config.model.path = model
    return found, check_sft_rows(config, tokenizer or tokenizer_with(CHATML), found)


def test_rows_that_can_be_learnt_are_counted_and_one_is_shown(tmp_path):
    found, datasets = check(tmp_path, [{"messages": TURNS}, {"messages": TURNS[:1]}])
    assert found.ok
    notes = [item.message for item in found.items]
    assert "1 sequences of 2 rows" in notes[0]
    assert "1 of 2 rows have nothing to learn" in notes[1]
    assert found.items[1].level == "warning"
    assert "«2<|im_end|>»\\n" in notes[2]
    facts = found.facts["data"]["train"]
    assert facts["learnt_tokens"] == 2
    assert facts["tokens"] == datasets["train"].num_tokens
    assert set(datasets) == {"train"}


def test_every_row_that_cannot_be_used_is_told_and_many_are_counted(tmp_path):
    found, datasets = check(tmp_path, [{"messages": TURNS}, *[{"x": 1}] * 12])
    assert datasets == {}
    errors = [item.message for item in found.of("error")]
    assert len(errors) == 11
    assert "row 1 (line 2): there is no column 'messages'" in errors[0]
    assert "12 problems in all" in errors[-1]
    assert len(found.facts["data_problems"]["train"]) == 12


@pytest.mark.parametrize("data", [{"val_files": ["nowhere.jsonl"]}])
def test_files_that_are_not_there_are_errors_of_their_key(tmp_path, data):
    found, datasets = check(tmp_path, [{"messages": TURNS}], **data)
    assert set(datasets) == {"train"}
    (error,) = found.of("error")
    assert error.key == "data.val_files"
    assert "no such file" in error.message


@pytest.mark.parametrize(("stop", "says"), [("<|im_end|>", 0), ("<|eot_id|>", 1)])
def test_an_end_that_generation_does_not_stop_at_is_told(tmp_path, stop, says):
    tokenizer = tokenizer_with(CHATML)
    LlamaConfig(eos_token_id=tokenizer.convert_tokens_to_ids(stop)).save_pretrained(tmp_path / "model")
    tokenizer.eos_token = "</s>"
    found, _ = check(tmp_path, [{"messages": TURNS}], model=str(tmp_path / "model"), tokenizer=tokenizer)
    warnings = [item.message for item in found.of("warning")]
    assert len(warnings) == says
    if says:
        assert "end with <|im_end|> (257), but generation" in warnings[0]
        assert "stop_token_ids=[257]" in warnings[0]
