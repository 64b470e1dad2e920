"""Conversations as a dataset: rendered, masked, cut, kept and collated."""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from burnish.config import SFTDataConfig
from burnish.data import SFTDataset, create_dataloader, sft_collate
from burnish.data.prepare import prepare_rows
from burnish.data.problems import Place
from burnish.data.sft_check import check_conversations
from burnish.data.sft_prepare import ConversationPreparer
from burnish.render import render
from burnish.utils.errors import DataError, ModelError
from tests.render.chat_templates import THINKING, TOOLS, tokenizer_with
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

TOKENIZER = tokenizer_with(CHATML, pad_is_end=True)
TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes 🙂"},
]


def dataset_of(rows, tokenizer=TOKENIZER, max_samples=-1, **config):
    return SFTDataset.from_rows(rows, tokenizer, SFTDataConfig(**config), max_samples)


def learnt(item, tokenizer=TOKENIZER):
    return tokenizer.decode([i for i, wanted in zip(item["input_ids"], item["loss_mask"], strict=True) if wanted])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_item_is_the_conversation_with_the_answers_marked():
    (item,) = list(dataset_of([{"messages": TURNS, "data_source": "mine"}]))
    assert item["input_ids"] == render(TURNS, TOKENIZER, add_generation_prompt=False)
    assert learnt(item) == "2<|im_end|>yes 🙂<|im_end|>"
    assert item["loss_mask"][0] is False
    assert (item["index"], item["data_source"]) == (0, "mine")
    assert all(type(value) is int for value in item["input_ids"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
def test_every_format_gives_the_same_items(tmp_path, name):
    rows = [{"messages": TURNS[: 2 * (1 + i % 2)]} for i in range(3)]
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name == "a.csv":
        cells = ['"' + json.dumps(row["messages"]).replace('"', '""') + '"' for row in rows]
        path.write_text("\n".join(["messages", *cells]) + "\n")
    else:
        path.write_text(json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    dataset = SFTDataset(str(path), TOKENIZER, SFTDataConfig())
    assert list(dataset) == list(dataset_of(rows))
    assert dataset.location(1).startswith(f"{path}, row 1")


def test_tool_calls_of_a_parquet_file_lose_the_nulls_that_the_format_adds(tmp_path):
    def call(arguments):
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    template = CHATML.replace("<|im_end|>", "{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>")
    tokenizer = tokenizer_with(template)
    rows = [{"messages": [TURNS[0], call({"a": 1})]}, {"messages": [TURNS[0], call({"b": 2})]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_file = SFTDataset(str(tmp_path / "a.parquet"), tokenizer, SFTDataConfig())
    assert '"arguments": {"a": 1}' in learnt(from_file[0], tokenizer)
    assert '"arguments": {"b": 2}' in learnt(from_file[1], tokenizer)


def test_pairs_without_a_chat_template_are_what_a_base_model_goes_on_from():
    tokenizer = byte_tokenizer(None, begin=True)
    rows = [{"q": "1+1=", "a": "2"}]
    (item,) = list(dataset_of(rows, tokenizer, prompt_key="q", response_key="a"))
    assert item["input_ids"][: -len("2") - 1] == render("1+1=", tokenizer)
    assert learnt(item, tokenizer) == "2<|im_end|>"
    with pytest.raises(ModelError, match="no chat template"):
        dataset_of([{"messages": TURNS}], tokenizer)


def test_train_on_last_system_prompt_and_template_variables_reach_the_rows():
    (item,) = list(dataset_of([{"messages": TURNS}], train_on="last", system_prompt="Be brief."))
    assert learnt(item) == "yes 🙂<|im_end|>"
    assert TOKENIZER.decode(item["input_ids"]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    tokenizer = tokenizer_with(THINKING)
    on, off = dataset_of(
        [{"messages": TURNS[:2]}, {"messages": TURNS[:2], "enable_thinking": False}],
        tokenizer,
        apply_chat_template_kwargs={"enable_thinking": True},
    )
    assert learnt(on, tokenizer) == "<think>\n\n</think>\n\n2<|im_end|>"
    assert learnt(off, tokenizer) == "2<|im_end|>"


def test_a_row_may_become_several_items_and_is_refused_without_the_key():
    tokenizer = tokenizer_with(THINKING)
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}]
    with pytest.raises(DataError, match=r"dataset, row 1: .*data.ignore_input_ids_mismatch=true"):
        dataset_of(rows, tokenizer)
    dataset = dataset_of(rows, tokenizer, ignore_input_ids_mismatch=True)
    assert [item["index"] for item in dataset] == [0, 1, 1]
    empty = "<think>\n\n</think>\n\n"
    assert [learnt(item, tokenizer) for item in dataset][1:] == [f"{empty}2<|im_end|>", f"{empty}yes 🙂<|im_end|>"]
    assert dataset.notes["several"] == 1


# -------------------------------------------------------------------------------------------- too long

LONG = [TURNS[0], {"role": "assistant", "content": "x" * 40}]


def test_a_conversation_that_is_too_long_names_the_ways_out():
    with pytest.raises(
        DataError, match=r"row 0: The conversation has \d+ tokens.*data.max_length=50.*truncation to right"
    ):
        dataset_of([{"messages": LONG}], max_length=50)


def test_cut_at_the_right_an_answer_loses_its_end_and_that_is_told(caplog):
    whole = dataset_of([{"messages": LONG}])[0]
    dataset = dataset_of([{"messages": LONG}, {"messages": TURNS[:2]}], max_length=50, truncation="right")
    assert dataset[0]["input_ids"] == whole["input_ids"][:50]
    assert dataset[0]["loss_mask"] == whole["loss_mask"][:50]
    assert dataset[1] == {**dataset_of([{"messages": TURNS[:2]}])[0], "index": 1}
    assert (dataset.notes["cut"], dataset.notes["answers_without_end"]) == (1, 1)
    assert "1 answers lost their end" in caplog.text
    assert "dataset, row 0" in caplog.text


def test_cut_at_the_left_the_end_stays_and_the_first_token_is_never_learnt():
    whole = dataset_of([{"messages": LONG}])[0]
    dataset = dataset_of([{"messages": LONG}], max_length=20, truncation="left")
    item = dataset[0]
    assert item["input_ids"] == whole["input_ids"][-20:]
    assert item["loss_mask"] == [False, *whole["loss_mask"][-19:]]
    assert learnt(item).endswith("x<|im_end|>")
    assert dataset.notes["answers_without_end"] == 0


def test_what_has_nothing_to_learn_is_left_out_and_told(caplog):
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS[:1]}, {"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}]
    dataset = dataset_of(rows)
    assert [item["index"] for item in dataset] == [0]
    assert "2 of 3 rows have nothing to learn" in caplog.text
    with pytest.raises(DataError, match="nothing to learn.*2 of 2 rows"):
        dataset_of(rows[1:])
    prompt = [{"role": "user", "content": "x" * 60}, TURNS[1]]
    with pytest.raises(DataError, match="nothing to learn.*1 conversations had nothing left"):
        dataset_of([{"messages": prompt}], max_length=50, truncation="right")


def test_empty_answers_and_texts_that_were_templated_before_are_told(caplog):
    dataset_of(
        [
            {"messages": [TURNS[0], {"role": "assistant", "content": ""}]},
            {"messages": [{"role": "user", "content": "<|im_start|>user\nhi<|im_end|>"}, TURNS[1]]},
        ]
    )
    assert "1 answers are empty" in caplog.text
    assert "before what is learnt" not in caplog.text
    assert "1 rows hold the chat template's own tokens" in caplog.text


@pytest.mark.parametrize(
    ("answer", "is_empty"),
    [
        ({"content": " \n"}, True),
        ({"content": [{"type": "text", "text": ""}]}, True),
        ({"content": "0"}, False),
        ({"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}, False),
    ],
)
def test_an_answer_without_a_text_or_a_call_is_told_as_empty(answer, is_empty):
    dataset = dataset_of([{"messages": [TURNS[0], {"role": "assistant", **answer}]}], tokenizer_with(TOOLS))
    assert dataset.notes["empty"] == is_empty


def test_answers_to_nothing_are_told_with_the_first(caplog):
    asked, nothing = TURNS[:2], [{"role": "user", "content": " "}, TURNS[1]]
    system = {"role": "system", "content": "Be brief."}
    dataset = dataset_of([{"messages": messages} for messages in (asked, nothing, [system, *nothing], asked)])
    assert (len(dataset), dataset.notes["empty_prompts"]) == (4, 2)
    assert "2 of 4 rows have nothing but empty messages" in caplog.text
    assert "The first: dataset, row 1" in caplog.text
    pairs = {"prompt_key": "q", "response_key": "a"}
    begins = byte_tokenizer(None, begin=True)
    assert dataset_of([{"q": "", "a": "2"}], begins, **pairs).notes["empty_prompts"] == 1
    with pytest.raises(DataError, match=r"dataset, row 0: column 'q': The prompt '' has no tokens.*leave it out"):
        dataset_of([{"q": "", "a": "2"}], byte_tokenizer(None), **pairs)


def test_roles_that_no_template_knows_and_tools_that_it_does_not_show_are_told(caplog):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    shouted = [TURNS[0], {"role": "Assistant", "content": "2"}]
    rows = [{"messages": TURNS, "tools": [tool]}, {"messages": TURNS}, {"messages": shouted}]
    dataset_of(rows)
    assert "1 rows have messages of other roles than system, developer, user, assistant" in caplog.text
    assert (
        "1 rows have tools, and the chat template shows none of them to the model. The first: dataset, row 0"
        in caplog.text
    )
    caplog.clear()
    dataset_of(rows[:1], tokenizer_with(TOOLS))
    assert caplog.text == ""


def test_max_samples_reads_no_more_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}] * 2) and tmp_path / "a.jsonl"
    path.write_text(path.read_text() + "no json\n")
    assert len(SFTDataset(str(path), TOKENIZER, SFTDataConfig(), 2)) == 2
    with pytest.raises(DataError, match=r"a.jsonl, row 2 \(line 3\): this is not JSON"):
        SFTDataset(str(path), TOKENIZER, SFTDataConfig())


# -------------------------------------------------------------------------------- checking, keeping, sharing


def test_every_problem_of_a_file_is_found_with_its_place(tmp_path):
    rows = [{"messages": TURNS}, {"messages": 7}, {"x": 1}, {"messages": [TURNS[1]]}]
    config = SFTDataConfig(train_files=[write_jsonl(tmp_path / "a.jsonl", rows)])
    problems = check_conversations(config, TOKENIZER)
    assert [problem.row for problem in problems] == [1, 2, 3]
    assert [problem.column for problem in problems] == ["messages"] * 3
    assert len(check_conversations(config, TOKENIZER, max_problems=2)) == 2
    (missing,) = check_conversations(SFTDataConfig(train_files=["nowhere.jsonl"]), TOKENIZER)
    assert "no such file" in missing.message


def test_kept_rows_are_the_same_and_change_with_what_they_depend_on(tmp_path, caplog, monkeypatch):
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": LONG}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)

    def read(**config):
        keys = {"max_length": 60, "truncation": "right", "cache_dir": str(tmp_path / "kept"), **config}
        return SFTDataset(file, TOKENIZER, SFTDataConfig(**keys))

    first = read()
    caplog.clear()
    monkeypatch.setattr(ConversationPreparer, "prepare", lambda *_: pytest.fail("rendered again"))
    again = read()
    assert list(again) == list(first)
    assert (again.notes, again.num_rows, again.location(1)) == (first.notes, first.num_rows, first.location(1))
    assert "1 of 3 rows have nothing to learn" in caplog.text
    monkeypatch.undo()
    assert len(list((tmp_path / "kept").iterdir())) == 1
    for changed in ({"train_on": "last"}, {"max_length": 61}, {"truncation": "left"}, {"system_prompt": "s"}):
        read(**changed)
    assert len(list((tmp_path / "kept").iterdir())) == 5


@pytest.mark.slow
def test_several_processes_give_the_rows_of_one():
    rows = [(Place("f", i), {"messages": TURNS[: 2 * (1 + i % 2)]} if i % 50 else {"x": 1}) for i in range(700)]
    alone = list(prepare_rows(rows, ConversationPreparer(TOKENIZER, SFTDataConfig())))
    together = list(prepare_rows(rows, ConversationPreparer(TOKENIZER, SFTDataConfig()), num_workers=2, min_rows=100))
    assert len(alone) == len(together) == 700
    for one, other in zip(alone, together, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Exception):
            assert one.problem == other.problem
        else:
            assert [s.ids.tolist() for s in one.sequences] == [s.ids.tolist() for s in other.sequences]
            assert [s.spans for s in one.sequences] == [s.spans for s in other.sequences]


# ------------------------------------------------------------------------------------------------ batches


def test_a_batch_holds_each_row_in_the_engines_layout():
    dataset = dataset_of([{"messages": TURNS}, {"messages": LONG}, {"messages": TURNS[:2]}])
    items = list(dataset)
    pad = TOKENIZER.pad_token_id
    batch = sft_collate(items, pad)
    tensors = batch.tensors
    width = tensors["prompts"].shape[1]
    for i, item in enumerate(items):
        there = tensors["attention_mask"][i]
        assert tensors["input_ids"][i][there].tolist() == item["input_ids"]
        assert tensors["position_ids"][i][there].tolist() == list(range(len(item["input_ids"])))
        first = item["loss_mask"].index(True)
        assert tensors["attention_mask"][i, width - first : width].all()
        assert not tensors["attention_mask"][i, : width - first].any()
        assert tensors["response_mask"][i].sum() == len(item["input_ids"]) - first
        response = tensors["response_mask"][i]
        assert tensors["loss_mask"][i][response].tolist() == item["loss_mask"][first:]
        assert not tensors["loss_mask"][i][~response].any()
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], 1))
    assert (tensors["input_ids"][~tensors["attention_mask"]] == pad).all()
    assert batch.meta_info["pad_token_id"] == pad
    assert tensors["loss_mask"].sum() == dataset.num_learnt
    assert dataset.num_tokens == sum(dataset.lengths) == tensors["attention_mask"].sum()


def test_padded_rows_of_a_class_of_the_users_own_lose_their_padding():
    item = dataset_of([{"messages": TURNS[:2]}])[0]
    length = len(item["input_ids"])
    padded = {
        "input_ids": torch.tensor([*item["input_ids"], 0, 0]),
        "loss_mask": torch.tensor([*map(int, item["loss_mask"]), 0, 0]),
        "attention_mask": torch.tensor([1] * length + [0, 0]),
    }
    one, other = sft_collate([padded]).tensors, sft_collate([item]).tensors
    assert all(torch.equal(one[key], other[key]) for key in other.keys())  # noqa: SIM118
    assert len({*sft_collate([item, item]).non_tensor_batch["uid"]}) == 2


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ({"input_ids": [1, 2], "loss_mask": [False, False], "index": 4}, "Row 4 .* no token to learn"),
        ({"input_ids": [1, 2], "loss_mask": [True, False]}, "begins with a token to learn"),
        ({"input_ids": [1, 2], "loss_mask": [True]}, "2 input_ids and a loss_mask of 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "other values than 0 and 1"),
        ({"input_ids": [1.5, 2], "loss_mask": [0, 1]}, "with a fraction as input_ids"),
        ({"input_ids": ["a", "b"], "loss_mask": [0, 1]}, "input_ids that are no list of numbers"),
    ],
)
def test_rows_that_cannot_be_learnt_are_named(item, what):
    with pytest.raises(DataError, match=what):
        sft_collate([item])


def test_a_quiet_dataset_says_nothing(caplog):
    with caplog.at_level(logging.INFO):
        dataset_of([{"messages": TURNS}])
    assert caplog.text == ""


@pytest.mark.slow
def test_batches_come_whole_out_of_a_process_that_reads_ahead():
    dataset = dataset_of([{"messages": TURNS[: 2 * (1 + i % 2)]} for i in range(4)])
    here, there = (
        list(
            create_dataloader(dataset, 2, shuffle=False, seed=0, num_workers=n, drop_last=True, collate_fn=sft_collate)
        )
        for n in (0, 1)
    )
    assert len(here) == len(there) == 2
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors.keys())  # noqa: SIM118
        assert one.meta_info == other.meta_info
