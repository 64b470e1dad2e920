"""Data at URLs: read as if it lay here, and named by its URL where something is wrong with it."""

import gzip
import json
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.config import DataConfig, load_config
from burnish.config.paths import check_paths
from burnish.data import RLHFDataset, check_rows, resolve_files
from burnish.data.remote import RemoteFile, is_remote_pattern
from burnish.utils import storage
from burnish.utils.errors import ConfigError, DataError
from burnish.utils.storage import cache
from tests.render.fake_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    cache._localized.cache_clear()


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder of data at a URL, one file of each kind."""
    url = f"memory://{uuid.uuid4().hex}"
    system, path = storage.filesystem(url)
    rows = [{"prompt": prompt} for prompt in "xyz"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    system.pipe(f"{path}/a.parquet", (tmp_path / "a.parquet").read_bytes())
    system.pipe(f"{path}/b.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    system.pipe(f"{path}/deep/c.csv", b"prompt\nw\n")
    system.pipe(f"{path}/README.md", b"")
    return url


def prompts_of(files, **options):
    dataset = RLHFDataset(files, TOKENIZER, DataConfig(**options))
    return "".join(row["raw_prompt"][0]["content"] for row in dataset)


def test_files_folders_and_patterns_at_urls(place: str) -> None:
    assert prompts_of(f"{place}/a.parquet") == "xyz"
    assert prompts_of(place) == prompts_of(f"{place}/[ab].*") == "xyzxyz"
    assert prompts_of([f"{place}/**/*.csv", f"{place}/a.parquet"]) == "wxyz"


def test_a_file_that_is_read_twice_is_fetched_once(place: str, tmp_path: Path) -> None:
    assert prompts_of(f"{place}/a.parquet") == prompts_of(f"{place}/a.parquet") == "xyz"
    assert [file.name for file in (tmp_path / "cache").rglob("*.parquet")] == ["a.parquet"]
    (copy,) = resolve_files(f"{place}/a.parquet")
    assert copy.is_relative_to(tmp_path / "cache")


def test_rendered_rows_are_found_again_until_the_file_changes(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    url = f"{place}/deep/c.csv"
    assert prompts_of(url, cache_dir=str(folder)) == prompts_of(url, cache_dir=str(folder)) == "w"
    assert len(list(folder.iterdir())) == 1
    storage.write_text(url, "prompt\nvv\n")
    cache._localized.cache_clear()
    assert prompts_of(url, cache_dir=str(folder)) == "vv"
    assert len(list(folder.iterdir())) == 2


def test_what_is_wrong_names_the_url(place: str, tmp_path: Path) -> None:
    storage.write_text(f"{place}/bad.jsonl", '{"prompt": "x"}\n{"prompt": \n')
    storage.write_text(f"{place}/bad.parquet", "no parquet")
    with pytest.raises(DataError, match=rf"^{place}/bad.jsonl, row 1 \(line 2\): this is not JSON"):
        prompts_of(f"{place}/bad.jsonl")
    with pytest.raises(DataError, match=rf"^{place}/bad.parquet: this parquet file cannot be read") as caught:
        prompts_of(f"{place}/bad.parquet")
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(DataError, match=rf"data.train_files={place}/none.jsonl: there is no such file"):
        prompts_of(f"{place}/none.jsonl")
    with pytest.raises(DataError, match=r"no file matches this pattern"):
        prompts_of(f"{place}/*.json")
    with pytest.raises(DataError, match=r"files whose names end in .* are read, not '.md'"):
        prompts_of(f"{place}/README.md")
    with pytest.raises(DataError, match=r"fsspec knows no places of nowhere://"):
        prompts_of("nowhere://x/a.jsonl")
    problems = check_rows(DataConfig(train_files=[f"{place}/bad.jsonl"]), TOKENIZER)
    assert [problem.file for problem in problems] == [f"{place}/bad.jsonl"]


def test_a_data_set_that_its_library_saved_is_fetched_whole(place: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": prompt} for prompt in "uv"]).save_to_disk(str(tmp_path / "saved"))
    storage.upload_folder(tmp_path / "saved", f"{place}/saved")
    assert prompts_of(f"{place}/saved") == "uv"


def test_training_and_test_data_in_one_folder_are_told_apart_there_too(place: str) -> None:
    storage.write_text(f"{place}/both/train.jsonl", '{"prompt": "x"}')
    storage.write_text(f"{place}/both/test.jsonl", '{"prompt": "x"}')
    with pytest.raises(DataError, match="look like data of training and of testing"):
        prompts_of(f"{place}/both")


def test_the_question_mark_of_a_web_address_is_no_wildcard() -> None:
    assert not is_remote_pattern("https://host/a.jsonl?sig=abc")
    assert is_remote_pattern("s3://bucket/a?.jsonl")
    file = RemoteFile("https://host/a.jsonl?sig=abc")
    assert (file.name, file.suffix, str(file)) == ("a.jsonl", ".jsonl", "https://host/a.jsonl?...")


def test_what_a_configuration_names_at_urls_is_looked_for_before_anything_starts(
    place: str, tiny_model_path: str, tmp_path: Path
) -> None:
    storage.upload_folder(tiny_model_path, f"{place}/model")

    def check(**keys: str) -> None:
        overrides = {"actor_rollout_ref.model.path": f"{place}/model", "data.train_files": f"{place}/a.parquet"}
        check_paths(load_config([{"data.val_files": None, "recipe": "demo", **overrides, **keys}]))

    check()
    check(**{"data.train_files": f"{place}/*.gz"})
    with pytest.raises(ConfigError, match=rf"data.train_files={place}/none.jsonl: there is no such file"):
        check(**{"data.train_files": f"{place}/none.jsonl"})
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref.model.path={place}/deep: there is no config.json"):
        check(**{"actor_rollout_ref.model.path": f"{place}/deep"})
    with pytest.raises(ConfigError, match=r"max_position_embeddings"):
        check(**{"data.max_prompt_length": 600})
    with pytest.raises(ConfigError, match=r"there is no such file"):
        check(**{"reward.custom_reward_function.path": f"{place}/reward.py"})
