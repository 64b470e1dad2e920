import json
import logging
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from burnish.config import CustomClassConfig, DataConfig
from burnish.data import RLHFDataset, create_rl_dataset
from burnish.render import render
from burnish.utils.errors import ConfigError, DataError
from tests.render.fake_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
RAW = byte_tokenizer(None)


def row(prompt="1+1=", **columns):
    return {
        "prompt": prompt,
        "data_source": "s",
        "reward_model": {"ground_truth": 2},
        "extra_info": {"a": 1},
        **columns,
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset_of(rows, tokenizer=TOKENIZER, **config):
    return RLHFDataset.from_rows(rows, tokenizer, DataConfig(**config))


def test_a_row_holds_what_the_batch_needs(tmp_path):
    messages = [{"role": "user", "content": "1+1="}]
    dataset = RLHFDataset(write_jsonl(tmp_path / "a.jsonl", [row(messages, ability="math")]), TOKENIZER, DataConfig())
    got = dataset[0]
    assert got.pop("input_ids").tolist() == render(messages, TOKENIZER)
    assert got == {
        "raw_prompt": messages,
        "index": 0,
        "data_source": "s",
        "reward_model": {"ground_truth": 2},
        "extra_info": {"a": 1},
        "ability": "math",
    }
    assert dataset[0]["input_ids"].dtype == torch.int64


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    rows = [row([{"role": "user", "content": f"{i}"}], extra_info={f"k{i}": i}) for i in range(3)]
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    one = RLHFDataset(str(parquet), TOKENIZER, DataConfig())
    other = RLHFDataset(write_jsonl(tmp_path / "a.jsonl", rows), TOKENIZER, DataConfig())
    for left, right in zip(one, other, strict=True):
        assert left.pop("input_ids").equal(right.pop("input_ids"))
        assert left == right


def test_files_follow_one_another_and_duplicates_keep_numbers_of_their_own(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [row(), row()]) for name in "ab"]
    dataset = RLHFDataset(files, TOKENIZER, DataConfig())
    assert [dataset[i]["index"] for i in range(4)] == [0, 1, 2, 3]
    assert dataset.location(2) == f"{files[1]}, row 0 (line 1)"


def test_a_missing_prompt_names_file_row_columns_and_the_key_to_set(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row(), {"question": "1+1=", "answer": "2"}])
    with pytest.raises(DataError) as error:
        RLHFDataset(file, TOKENIZER, DataConfig())
    for part in (file, "row 1", "'prompt'", "question, answer", "data.prompt_key=question"):
        assert part in str(error.value)


def test_a_plain_question_and_answer_file_runs_by_mapping_the_prompt():
    (got,) = dataset_of([{"question": "1+1=", "ground_truth": "2"}], prompt_key="question")
    assert got["raw_prompt"] == [{"role": "user", "content": "1+1="}]
    assert got["reward_model"] == {"ground_truth": "2"}
    assert (got["data_source"], got["extra_info"]) == ("unknown", {})
    assert "question" not in got


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (row(7), "column 'prompt' is int"),
        (row(None), r"column 'prompt' is empty \(null\): there is no prompt. Give it one"),
        (row([]), "list of messages is empty"),
        (row([{"content": "x"}]), "Message 0 has no 'role'"),
        (row(data_source=3), "column 'data_source' is int"),
        (row(extra_info=[1]), "column 'extra_info' is list"),
        (row(reward_model="{"), "column 'reward_model' is a text that is not JSON"),
    ],
)
def test_one_bad_row_among_many_is_found_at_construction(bad, what):
    with pytest.raises(DataError, match=f"dataset, row 900: .*{what}"):
        dataset_of([row()] * 900 + [bad] + [row()] * 99)


@pytest.mark.parametrize(
    "truth", ["72", 72, 72.0, ["72"], {"target": "72"}, None, np.int64(72), np.array([1, 2]), {"a": np.float32(0.5)}]
)
def test_ground_truths_arrive_as_plain_values(truth):
    got = dataset_of([row(reward_model={"ground_truth": truth})])[0]["reward_model"]["ground_truth"]
    assert got == json.loads(json.dumps(got))
    if not isinstance(truth, (np.generic, np.ndarray, dict)):
        assert got == truth
        assert type(got) is type(truth)


def test_extra_info_may_be_a_json_string_which_keeps_its_keys_and_nulls():
    assert dataset_of([row(extra_info='{"a": null}')])[0]["extra_info"] == {"a": None}


def test_columns_named_like_batch_keys_are_kept_under_another_name():
    got = dataset_of([row(uid="u", index=9, responses="r")])[0]
    assert (got["row/uid"], got["row/index"], got["row/responses"], got["index"]) == ("u", 9, "r", 0)


def test_a_string_prompt_stays_one_without_a_template():
    got = dataset_of([row("hi")], RAW)[0]
    assert got["raw_prompt"] == "hi"
    assert len(got["input_ids"]) == 2


ROWS = [row("12345"), row("1234567890"), row("123")]


def test_an_overlong_prompt_is_an_error_that_names_the_row():
    with pytest.raises(
        DataError,
        match=r"dataset, row 1: column 'prompt': The prompt has 10 tokens, more than data.max_prompt_length=5",
    ):
        dataset_of(ROWS, RAW, max_prompt_length=5)


@pytest.mark.parametrize("config", [{"truncation": "drop"}, {"filter_overlong_prompts": True}])
def test_overlong_prompts_are_left_out_and_counted(config, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = dataset_of(ROWS, RAW, max_prompt_length=5, **config)
    assert [got["index"] for got in dataset] == [0, 2]
    assert (dataset.num_rows, dataset.num_filtered, dataset.num_truncated, len(dataset)) == (3, 1, 0, 2)
    assert "1 of 3 rows were left out" in caplog.text


@pytest.mark.parametrize(("policy", "kept"), [("left", "67890"), ("right", "12345"), ("middle", "12890")])
def test_overlong_prompts_are_cut_and_counted(policy, kept, caplog):
    dataset = dataset_of(ROWS, RAW, max_prompt_length=5, truncation=policy)
    assert RAW.decode(dataset[1]["input_ids"]) == kept
    assert (len(dataset), dataset.num_truncated) == (3, 1)
    assert "1 of 3 prompts were cut" in caplog.text


def test_no_row_and_no_row_left_are_errors_with_counts(tmp_path):
    with pytest.raises(DataError, match="it holds no rows"):
        RLHFDataset(write_jsonl(tmp_path / "a.jsonl", []), TOKENIZER, DataConfig())
    with pytest.raises(DataError, match="3 rows were read and 3 left out"):
        dataset_of(ROWS, RAW, max_prompt_length=2, truncation="drop")


def test_max_samples_reads_the_first_rows():
    assert len(RLHFDataset.from_rows(ROWS, RAW, DataConfig(), max_samples=2)) == 2
    with pytest.raises(DataError, match="max_samples is 0, so no row would be read. Set -1"):
        RLHFDataset.from_rows(ROWS, RAW, DataConfig(), max_samples=0)


def test_texts_that_were_templated_before_are_reported(caplog):
    dataset_of([row("<|im_start|>user\nhi<|im_end|>\n"), row()])
    assert "1 prompts are texts that hold the chat template's own tokens" in caplog.text


def test_a_prompt_without_a_token_names_file_row_column_and_what_to_do(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row(), row("")])
    with pytest.raises(DataError) as error:
        RLHFDataset(file, RAW, DataConfig())
    for part in (f"{file}, row 1 (line 2)", "column 'prompt'", "no tokens", "Give it a text, or leave it out"):
        assert part in str(error.value)


SAID_BY_SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "is_empty"),
    [
        ("", True),
        (" \n\t", True),
        ("\u200b\ufeff", True),
        ([{"role": "user", "content": ""}], True),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], True),
        ([SAID_BY_SYSTEM, {"role": "user", "content": " "}], True),
        ("0", False),
        ("\U0001fae9", False),
        ([SAID_BY_SYSTEM], False),
        ([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": ""}], False),
    ],
)
def test_prompts_that_hold_nothing_but_what_the_template_writes_are_counted_with_the_first(prompt, is_empty, caplog):
    dataset = dataset_of([row(), row(prompt), row(), row(prompt)])
    assert (len(dataset), dataset.num_empty) == (4, 2 * is_empty)
    assert ("2 of 4 prompts are empty" in caplog.text) == is_empty
    assert ("the first: dataset, row 1." in caplog.text) == is_empty


def test_a_begin_token_and_a_system_prompt_do_not_fill_an_empty_prompt(caplog):
    begins = byte_tokenizer(None, begin=True)
    assert dataset_of([row("")], begins)[0]["input_ids"].tolist() == [begins.bos_token_id]
    assert "1 of 1 prompts are empty" in caplog.text
    assert dataset_of([row("")], system_prompt="Be brief.").num_empty == 1


@pytest.mark.parametrize("text", ["", " ", "🙂 日本語 שלום \u200b", "lone \ud83d", "x" * 100_000])
def test_strange_texts_load_and_can_be_dumped_as_utf8(text):
    got = dataset_of([row(text)], max_prompt_length=200_000)[0]
    dumped = json.dumps(got["raw_prompt"], ensure_ascii=False).encode()
    content = json.loads(dumped)[0]["content"]
    assert content == text or "\ud83d" in text
    assert len(content) == len(text)


def test_a_dataset_travels_to_another_process():
    dataset = pickle.loads(pickle.dumps(dataset_of([row()])))
    assert dataset[0]["index"] == 0


def test_create_reads_the_split_that_it_is_asked_for(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [row()] * 3)
    config = DataConfig(train_files=[train], val_files=[write_jsonl(tmp_path / "val.jsonl", [row()])])
    assert len(create_rl_dataset(config, TOKENIZER)) == 3
    assert len(create_rl_dataset(config, TOKENIZER, split="val")) == 1
    assert len(create_rl_dataset(config, TOKENIZER, split="val", rows=[row()] * 2)) == 2
    assert create_rl_dataset(DataConfig(train_files=[train], val_files=None), TOKENIZER, split="val") is None
    with pytest.raises(DataError, match=r"data.val_files=.*missing"):
        create_rl_dataset(DataConfig(val_files=["missing.jsonl"]), TOKENIZER, split="val")


def test_a_dataset_class_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "from burnish.data import RLHFDataset\n"
        "class Own(RLHFDataset):\n"
        "    def __getitem__(self, i):\n"
        "        return {**super().__getitem__(i), 'own': True}\n"
        "class Other: pass\n"
    )
    path = str(tmp_path / "own.py")
    train = write_jsonl(tmp_path / "train.jsonl", [row()])

    def create(name):
        custom = CustomClassConfig(path=path, name=name)
        return create_rl_dataset(DataConfig(train_files=[train], custom_cls=custom), TOKENIZER)

    assert create("Own")[0]["own"]
    with pytest.raises(ConfigError, match="data.custom_cls.name=Other: this is no subclass of torch.utils.data"):
        create("Other")
    with pytest.raises(ConfigError, match="data.custom_cls.name must name the class"):
        create(None)


def test_a_dataset_class_written_for_verl_is_made_by_its_order_of_arguments(tmp_path):
    (tmp_path / "own.py").write_text(
        "from burnish.utils.dataset.rl_dataset import RLHFDataset\n"
        "class Own(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        self.own = (config.get('prompt_key', 'x'), config.get('no_such_key', 7), config.custom['alpha'])\n"
        "        super().__init__(data_files, tokenizer, config, processor, max_samples)\n"
    )
    config = DataConfig(
        train_files=[write_jsonl(tmp_path / "train.jsonl", [row()] * 3)],
        train_max_samples=2,
        custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name="Own"),
        custom={"alpha": 0.3},
    )
    dataset = create_rl_dataset(config, TOKENIZER)
    assert (len(dataset), dataset.own) == (2, ("prompt", 7, 0.3))


def test_a_method_that_nothing_calls_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(
        "from burnish.data import RLHFDataset\n"
        "class Own(RLHFDataset):\n"
        "    def _read_files_and_tokenize(self): raise AssertionError\n"
    )
    config = DataConfig(
        train_files=[write_jsonl(tmp_path / "train.jsonl", [row()])],
        custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name="Own"),
    )
    with pytest.raises(ConfigError, match="name=Own: _read_files_and_tokenize would never be called"):
        create_rl_dataset(config, TOKENIZER)
