import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data import read_rows, resolve_files
from burnish.utils.errors import DataError


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows_of(path):
    return [row for _, row in read_rows(path)]


def test_one_path_or_several_with_the_home_folder_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "a.jsonl", "{}")
    assert resolve_files("~/a.jsonl") == resolve_files(["~/a.jsonl"]) == resolve_files(file) == [file]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nowhere.jsonl", r"data.val_files=.*nowhere.jsonl: there is no such file"),
        ("rows.tsv", r"rows.tsv: files whose names end in .parquet, .jsonl, .json, .csv, .* are read, not '.tsv'"),
        ("none*.jsonl", r"no file matches this pattern"),
        (
            "mixed",
            r"mixed: this folder holds test.jsonl and train.jsonl, which look like data of training and of testing",
        ),
        ("empty", r"empty: this folder holds no file whose name ends in .*empty/\*\*/\*.parquet"),
    ],
)
def test_what_is_no_data_file_is_named_with_its_key(tmp_path, name, what):
    for folder in ("mixed", "empty"):
        (tmp_path / folder).mkdir()
    for name_ in ("rows.tsv", "mixed/train.jsonl", "mixed/test.jsonl", "empty/.hidden.jsonl"):
        write(tmp_path / name_, "{}")
    with pytest.raises(DataError, match=what):
        resolve_files([str(tmp_path / name)], key="data.val_files")


def test_no_file_at_all_is_an_error():
    with pytest.raises(DataError, match="data.train_files names no file"):
        resolve_files([])


def test_jsonl_stands_a_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \r\n{"a": "\xe2\x80\xa8x"}\r\n')
    assert rows_of(file) == [{"a": 1}, {"a": "\u2028x"}]
    assert [location for location, _ in read_rows(file)] == [f"{file}, row 0 (line 1)", f"{file}, row 1 (line 4)"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"a": ', r"row 1 \(line 2\): this is not JSON"),
        (b"[1]", r"row 1 \(line 2\): this is list, not an object"),
        (b'{"a": "\xff"}', r"row 1 \(line 2\): this is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, what):
    with pytest.raises(DataError, match=what):
        rows_of(write(tmp_path / "a.jsonl", b'{"a": 1}\n' + line))


def test_halves_of_surrogate_pairs_are_replaced_and_whole_ones_kept(tmp_path):
    (row,) = rows_of(write(tmp_path / "a.jsonl", r'{"a": "x\ud83d", "b": ["\ud83d\ude42"]}'))
    assert row == {"a": "x\ufffd", "b": ["🙂"]}
    json.dumps(row, ensure_ascii=False).encode()


def test_objects_in_parquet_do_not_grow_the_keys_of_other_rows(tmp_path):
    file = tmp_path / "a.parquet"
    rows = [
        {"extra_info": {"a": 1, "b": 2, "c": 3}, "list": [{"x": 1}, {"y": 2}], "plain": None},
        {"extra_info": {"a": 4, "b": 5}, "list": [], "plain": "p"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert rows_of(file) == rows
    assert all(type(value) is int for row in rows_of(file) for value in row["extra_info"].values())
    assert [location for location, _ in read_rows(file)] == [f"{file}, row 0", f"{file}, row 1"]


def test_a_pandas_index_is_no_column(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "__index_level_0__": [5]}), file)
    assert rows_of(file) == [{"prompt": "a"}]


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a.parquet: this parquet file cannot be read"):
        rows_of(write(tmp_path / "a.parquet", "no"))
