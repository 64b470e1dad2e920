"""Rendered by several processes, kept in a cache, and checked row by row: always the same rows."""

import datetime
import json
import logging
import os
import pickle
import threading

import pytest
from transformers import PreTrainedTokenizerFast

from burnish.config import CustomClassConfig, DataConfig
from burnish.data import RLHFDataset, check_rows, prepare
from burnish.data.prepare import RowPreparer, prepare_rows
from burnish.data.problems import FileError, Place, RowError
from burnish.render import encode_composed, render
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.json_lines import replacing
from tests.render.fake_tokenizers import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer()


def rows_of(dataset):
    rows = [dataset[i] for i in range(len(dataset))]
    return [{**row, "input_ids": row["input_ids"].tolist(), "at": dataset.location(i)} for i, row in enumerate(rows)]


def preparer(tokenizer=TOKENIZER, policy="drop", **config):
    return RowPreparer(tokenizer, DataConfig(max_prompt_length=60, **config), [], policy)


@pytest.mark.slow
def test_several_processes_give_the_rows_of_one_in_order():
    rows = [(Place("f", i), {"prompt": "x" * (i % 50)} if i % 200 else {"no": 1}) for i in range(1200)]
    alone = list(prepare_rows(rows, preparer()))
    together = list(prepare_rows(rows, preparer(), num_workers=2, min_rows=100))
    assert len(alone) == len(together) == 1200
    for one, other in zip(alone, together, strict=True):
        assert type(one) is type(other)
        assert str(one.place) == str(other.place)
        if isinstance(one, Exception):
            assert one.problem == other.problem
        else:
            assert (one.columns, one.length) == (other.columns, other.length)
            assert (one.ids is None) == (other.ids is None)
            assert one.ids is None or one.ids.tolist() == other.ids.tolist()
    assert any(getattr(row, "ids", 0) is None for row in together)


def test_a_tokenizer_that_cannot_travel_names_the_key():
    stuck = byte_tokenizer()
    stuck.own = lambda: None
    rows = [(Place("f", i), {"prompt": "x"}) for i in range(3)]
    with pytest.raises(ConfigError, match="data.filter_overlong_prompts_workers=2: the tokenizer .* cannot be sent"):
        list(prepare_rows(rows, preparer(stuck), num_workers=2, min_rows=1))


def test_the_prompts_of_many_rows_are_tokenized_together(monkeypatch):
    sizes = []
    original = PreTrainedTokenizerFast._encode_plus

    def counting(tokenizer, text, *arguments, **options):
        sizes.append(len(text))
        return original(tokenizer, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counting)
    bad = {0: 7, 3: [], 700: None}
    rows = [(Place("f", i), {"prompt": bad.get(i, "x" * (i % 50))}) for i in range(1200)]
    prepared = list(preparer().prepare(rows))
    assert len(sizes) == 3
    assert sum(sizes) == 1200 - len(bad)
    assert [row.place.row for row in prepared] == list(range(1200))
    assert {row.place.row for row in prepared if isinstance(row, RowError)} == set(bad)
    assert all(row.ids.tolist() == render("x" * (row.place.row % 50), TOKENIZER) for row in prepared[4:40])


def test_prompts_are_tokenized_while_the_next_rows_are_read(monkeypatch):
    reads_on = threading.Event()
    waited = []

    def encode(prompts, tokenizer):
        waited.append(reads_on.wait(timeout=60))
        return encode_composed(prompts, tokenizer)

    def rows():
        for number in range(1000):
            if number == 999:
                reads_on.set()
            yield Place("f", number), {"prompt": "x"}

    monkeypatch.setattr(prepare, "encode_composed", encode)
    assert len(list(preparer().prepare(rows()))) == 1000
    assert all(waited)


def test_rows_before_one_that_cannot_be_read_are_prepared_first():
    def rows():
        yield Place("f", 0), {"prompt": "x"}
        yield Place("f", 1), {"prompt": 7}
        raise DataError("f: it ends here.")

    prepared = preparer().prepare(rows())
    assert next(prepared).place.row == 0
    assert "column 'prompt' is int (7)" in str(next(prepared))
    with pytest.raises(DataError, match="it ends here"):
        next(prepared)


def test_rows_before_one_on_which_the_template_fails_are_prepared_first():
    fails = byte_tokenizer(CHATML + "{{ messages[0].content + 1 if messages[0].content == 'y' }}")
    prepared = preparer(fails).prepare([(Place("f", i), {"prompt": text}) for i, text in enumerate("xxy")])
    assert [next(prepared).place.row, next(prepared).place.row] == [0, 1]
    with pytest.raises(TypeError):
        next(prepared)


class Telling:
    """Prepares rows by saying whether this process shares its work out over the cores."""

    tokenizer = None
    workers_key = "data.render_workers"
    num_workers = 2

    def prepare(self, rows):
        return [os.environ.get("TOKENIZERS_PARALLELISM") for _ in rows]


@pytest.mark.slow
def test_where_rows_are_shared_among_processes_each_of_them_takes_one_core(monkeypatch):
    rows = [(Place("f", i), {}) for i in range(3)]
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert list(prepare_rows(rows, Telling(), num_workers=2, min_rows=1)) == ["false"] * 3
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert list(prepare_rows(rows, Telling(), num_workers=2, min_rows=1)) == ["true"] * 3


# ----------------------------------------------------------------------------------------------- cache


@pytest.fixture
def file(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "日本" * 40, "extra_info": {"x": [1.5, None]}}, {"prompt": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "a.jsonl"


def load(file, tokenizer=TOKENIZER, max_samples=-1, **config):
    options = {"cache_dir": str(file.parent / "cache"), "max_prompt_length": 60, "truncation": "drop", **config}
    return RLHFDataset(str(file), tokenizer, DataConfig(**options), max_samples=max_samples)


def cached(file):
    return sorted((file.parent / "cache").iterdir())


def test_a_cached_set_is_the_set_and_is_not_rendered_again(file, monkeypatch):
    first = load(file)
    assert len(cached(file)) == 1
    monkeypatch.setattr(RowPreparer, "prepare", lambda *_: pytest.fail("a cached row was rendered"))
    again = load(file)
    assert rows_of(again) == rows_of(first) == rows_of(load(file, cache_dir=str(file.parent / "cache")))
    assert (again.num_rows, again.num_filtered) == (first.num_rows, first.num_filtered) == (3, 1)


def test_a_cached_set_says_again_what_is_empty(tmp_path, caplog):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": " "}\n')
    for _ in range(2):
        caplog.clear()
        assert load(file).num_empty == 1
        assert (
            f"1 of 2 prompts are empty (no text, or white space alone), so nothing is asked there, the first: {file}, row 1"
            in (caplog.text)
        )


def test_whatever_the_rows_depend_on_makes_another_cache_file(file):
    load(file)
    other_template = byte_tokenizer(CHATML.replace("im_start", "s"))
    changes = [
        {"max_prompt_length": 61},
        {"truncation": "left"},
        {"system_prompt": "s"},
        {"answer_key": "prompt", "prompt_key": "prompt"},
        {"default_data_source": "d"},
        {"apply_chat_template_kwargs": {"x": 1}},
        {"max_samples": 1},
        {"tokenizer": other_template},
        {"tokenizer": byte_tokenizer(begin=True)},
    ]
    for number, change in enumerate(changes, start=2):
        load(file, **change)
        assert len(cached(file)) == number, change
    file.write_text(file.read_text() + '\n{"prompt": "d"}')
    assert load(file).num_rows == 4


def test_a_template_that_writes_the_date_is_rendered_anew_each_day(file, monkeypatch):
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return cls(2999, 1, 1)

    dated = byte_tokenizer(CHATML + "{# strftime_now #}")
    for tokenizer in (dated, TOKENIZER):
        load(file, tokenizer)
    assert len(cached(file)) == 2
    monkeypatch.setattr(datetime, "date", Tomorrow)
    for tokenizer in (dated, TOKENIZER):
        load(file, tokenizer)
    assert len(cached(file)) == 3


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_cache_file_is_made_anew(file, damage, caplog):
    rows = rows_of(load(file))
    (path,) = cached(file)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert rows_of(load(file)) == rows
    assert "is damaged" in caplog.text
    assert path.read_bytes() == good


def test_users_who_share_a_cache_may_read_what_others_have_put_there(file):
    load(file)
    (path,) = cached(file)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_two_runs_that_render_the_same_set_at_once_keep_it_once(file):
    rows = load(file)
    (path,) = cached(file)
    before = path.read_bytes()
    path.unlink()
    with replacing(path) as temporary:
        assert rows_of(load(file)) == rows_of(rows)
        temporary.write_bytes(before)
    assert cached(file) == [path]


def test_a_cache_folder_that_cannot_be_written_does_no_harm(file, caplog):
    (file.parent / "cache").write_text("a file")
    assert len(load(file)) == 2
    assert "cannot be kept" in caplog.text


# ----------------------------------------------------------------------------------------------- check


def test_all_problems_are_told_with_file_row_column_seen_and_expected(tmp_path):
    lines = ['{"prompt": "ok"}', '{"prompt": 7}', "{broken", '{"question": "q"}', '{"prompt": "x", "extra_info": [1]}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.parquet").write_text("no")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "missing.csv")]
    config = DataConfig(train_files=files[:2], val_files={"one": files[2], "two": files[0]})
    problems = check_rows(config, TOKENIZER)
    assert [(problem.file, problem.row, problem.column) for problem in problems] == [
        (files[0], 1, "prompt"),
        (files[0], 2, None),
        (files[0], 3, "prompt"),
        (files[0], 4, "extra_info"),
        (files[1], None, None),
    ]
    assert problems[0].seen == "int (7)"
    assert "list of messages" in problems[0].expected
    assert problems[0].message.startswith(f"{files[0]}, row 1 (line 2): column 'prompt' is int")
    validation = check_rows(config, TOKENIZER, split="val")
    assert "data.val_files.one" in validation[0].message
    assert len(validation) == 5
    assert len(check_rows(config, TOKENIZER, max_problems=2)) == 2


def test_a_file_that_ends_early_is_told_behind_its_rows_and_is_none_of_the_rows_that_are_asked_for(tmp_path):
    for name, rows in (
        ("a", '[{"prompt": "x"}, {"prompt": 1}, {"prompt": "x"}, no'),
        ("b", '[{"prompt": 2}, {"prompt": 3}]'),
    ):
        (tmp_path / f"{name}.json").write_text(rows)
    (tmp_path / "c.parquet").write_text("no")
    files = [str(tmp_path / name) for name in ("a.json", "c.parquet", "b.json")]
    config = DataConfig(train_files=files)
    told = [(files[0], 1), (files[0], 3), (files[1], None), (files[2], 0), (files[2], 1)]
    assert [(one.file, one.row) for one in check_rows(config, TOKENIZER)] == told
    some = DataConfig(train_files=files, train_max_samples=4)
    assert [(one.file, one.row) for one in check_rows(some, TOKENIZER)] == told[:-1]
    assert [(one.file, one.row) for one in check_rows(config, TOKENIZER, max_problems=3)] == told[:3]


def test_an_error_of_a_whole_file_travels_to_other_processes():
    error = pickle.loads(pickle.dumps(FileError("it ends", "f")))
    assert error.problem == FileError("it ends", "f").problem
    assert (error.problem.file, error.problem.row, error.problem.message) == ("f", None, "it ends")


def test_what_is_checked_is_what_the_dataset_takes():
    rows = [{"prompt": "x"}] * 900 + [{"prompt": "y" * 99}] + [{"prompt": "x"}] * 99
    config = DataConfig(max_prompt_length=60)
    (problem,) = check_rows(config, TOKENIZER, rows=rows)
    with pytest.raises(DataError) as error:
        RLHFDataset.from_rows(rows, TOKENIZER, config, name="train_dataset")
    assert problem.message == str(error.value)
    assert (problem.file, problem.row) == ("train_dataset", 900)
    assert check_rows(DataConfig(max_prompt_length=60, truncation="left"), TOKENIZER, rows=rows) == []


def test_what_a_dataset_class_of_ones_own_raises_is_a_problem(tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch.utils.data import Dataset\n"
        "from burnish.utils.errors import DataError\n"
        "class Own(Dataset):\n"
        "    def __init__(self, **_): raise DataError('my own words')\n"
    )
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name="Own"))
    (problem,) = check_rows(config, TOKENIZER)
    assert problem.message == "my own words"
