"""Every format gives the same rows, and whatever a file holds, the answer is rows or a DataError."""

import datetime
import decimal
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.config.data_names import FORMATS
from burnish.data import RowError, read_rows
from burnish.data.cells import to_json_types
from burnish.data.files import read_source
from burnish.data.readers import READERS
from burnish.utils.errors import DataError

ROWS = [
    {"prompt": 'a, "b"\nc', "extra_info": {"x": [1, 2.5, None, True]}, "ground_truth": "72"},
    {"prompt": "日本\u2028語", "extra_info": {"y": {}}, "ground_truth": None},
]


def as_csv(rows):
    cells = [[row["prompt"], json.dumps(row["extra_info"]), row["ground_truth"] or ""] for row in rows]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells]
    return "\r\n".join(["prompt,extra_info,ground_truth", *quoted]) + "\r\n"


FILES = {
    "a.jsonl": "\n".join(json.dumps(row) for row in ROWS),
    "a.json": json.dumps(ROWS, indent=1),
    "lines.json": "\n".join(json.dumps(row) for row in ROWS),
    "a.csv": as_csv(ROWS),
}


def rows_of(path):
    return [row for _, row in read_rows(path)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_rows(tmp_path, name, bom, packed):
    data = bom + FILES[name].encode()
    path = tmp_path / (name.upper() + (".GZ" if packed else ""))
    path.write_bytes(gzip.compress(data) if packed else data)
    expected = ROWS
    if "csv" in name:
        expected = [{**row, "extra_info": json.dumps(row["extra_info"])} for row in ROWS]
    assert rows_of(path) == expected


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", '{"a": NaN}', "row 0 .*NaN is no number of JSON"),
        ("a.jsonl", '{"a": -Infinity}', "Infinity is no number of JSON"),
        ("a.jsonl", '{"a": 1e999}', "1e999 is larger than a float"),
        ("a.jsonl", '{"x": {"a": 1, "b": 2, "a": 3}}', "the key 'a' twice"),
        ("a.jsonl", "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"a": ' + "[" * 200 + "]" * 200 + "}", "column 'a' is nested more than 64 levels"),
        ("a.json", '[{"a": 1}, {"a": ]', "row 1: this is not JSON"),
        ("a.json", '[{"a": 1} {"a": 2}]', "after row 0 there is neither a comma"),
        ("a.json", '[{"a": 1}, 3]', "row 1: this is int, not an object"),
        ("a.json", '[{"a": 1}] x', "more behind the array's end: 'x'"),
        ("a.json", '"a"', "begins with .* one array of objects"),
        ("a.json", "\n", "this file is empty. A .json file holds one array of objects"),
        ("a.json", '{\n "a": 1\n}', r"row 0 \(line 1\): this is not JSON.*one array of objects"),
        ("a.csv", "a,b\n1,2\n3\n", r"row 1 \(line 3\): there are 1 cells for 2 columns"),
        ("a.csv", "a,a\n1,2\n", "'a' is empty or there twice"),
        ("a.csv", 'a\n"x', "this is no CSV file"),
        ("a.csv", "a\n\udcff".encode("utf-8", "surrogateescape"), "this is not UTF-8"),
        ("a.jsonl.gz", "no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=what):
        rows_of(path)


def test_a_csv_cell_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "x" * 500_000 + "\n")
    assert len(rows_of(tmp_path / "a.csv")[0]["a"]) == 500_000


def test_a_bad_line_does_not_hide_the_lines_behind_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    rows = [row for _, row in read_source(tmp_path / "a.jsonl")]
    assert (rows[0], rows[2]) == ({"a": 1}, {"a": 2})
    assert (rows[1].problem.row, rows[1].problem.expected) == (1, "a JSON object")


def test_no_more_is_read_than_is_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nbroken\n')
    assert next(read_source(tmp_path / "a.jsonl"))[1] == {"a": 1}


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (datetime.datetime(2024, 5, 1, 10, tzinfo=UTC), "2024-05-01T10:00:00+00:00"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (datetime.timedelta(minutes=1), 60.0),
        (decimal.Decimal("72"), 72),
        (decimal.Decimal("1.50"), 1.5),
        (decimal.Decimal("NaN"), None),
        (b"text", "text"),
        (float("nan"), None),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.array([[1, 2]]), [[1, 2]]),
        ({1: (np.int64(2), np.bool_(True))}, {"1": [2, True]}),
    ],
)
def test_cells_become_jsons_types(value, plain):
    got = to_json_types(value, "c")
    assert got == plain
    assert type(got) is type(plain)
    assert json.loads(json.dumps(got)) == plain


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"\xff\xd8", "'c' holds 2 bytes"),
        (float("inf"), "'c' holds inf"),
        (object(), "'c' holds object .* no form in JSON"),
    ],
)
def test_cells_that_json_does_not_have_are_named(value, what):
    with pytest.raises(RowError, match=what) as error:
        to_json_types([{"x": value}], "c")
    assert error.value.problem.column == "c"


def test_parquet_types_and_foreign_metadata(tmp_path):
    table = pa.table(
        {
            "when": pa.array([datetime.datetime(2024, 5, 1)], pa.timestamp("us")),
            "price": pa.array([decimal.Decimal("3.00")]),
            "name": pa.array([b"bytes"]),
            "word": pa.array(["w"]).dictionary_encode(),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        }
    ).replace_schema_metadata({"huggingface": "{no JSON", "pandas": "neither"})
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [
        {"when": "2024-05-01T00:00:00", "price": 3, "name": "bytes", "word": "w", "map": {"k": 1}}
    ]


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'a' is there twice"):
        rows_of(tmp_path / "a.parquet")


# ------------------------------------------------------------------------------------------------ fuzz

fuzzed = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def only_rows_or_a_data_error(path):
    try:
        rows = rows_of(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    for row in rows:
        assert isinstance(row, dict)
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()


@fuzzed
@given(data=st.binary(max_size=80) | st.text(alphabet='{}[]",:\\ud8aN1e9.-\n\r\0\ufeff', max_size=60).map(str.encode))
def test_random_bytes_in_any_format(tmp_path, data):
    for suffix in READERS:
        path = tmp_path / f"a{suffix}"
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
        only_rows_or_a_data_error(path)


@fuzzed
@given(rows=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=4), cut=st.floats(0, 1))
def test_files_cut_anywhere(tmp_path, rows, cut):
    texts = {".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows)}
    for suffix, text in texts.items():
        data = text.encode()
        (tmp_path / f"a{suffix}").write_bytes(data[: round(len(data) * cut)])
        only_rows_or_a_data_error(tmp_path / f"a{suffix}")
        packed = gzip.compress(data)
        (tmp_path / f"a{suffix}.gz").write_bytes(packed[: round(len(packed) * cut)])
        only_rows_or_a_data_error(tmp_path / f"a{suffix}.gz")


@fuzzed
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 900),
)
def test_parquet_files_with_bytes_changed(tmp_path, flips, cut):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"] * 5, "x": [{"k": 1}, {"k": None}] * 5}), path)
    data = bytearray(path.read_bytes())
    for place, value in flips:
        data[place % len(data)] = value
    path.write_bytes(bytes(data[:cut]))
    only_rows_or_a_data_error(path)


def test_the_configuration_knows_the_formats_that_are_read():
    assert set(FORMATS) == set(READERS)
