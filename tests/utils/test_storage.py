"""Places that URLs name: read, copied whole or not at all, and told of without their passwords."""

import errno
import json
import os
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from burnish.utils import storage
from burnish.utils.errors import StorageError
from burnish.utils.storage import cache, folders


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path: Path) -> str:
    """An empty place of its own."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/store"
    return f"file://{tmp_path}/store"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch) -> Path:
    """The cache of downloads, empty and forgotten by this process."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    cache._localized.cache_clear()
    yield tmp_path / "cache"
    cache._localized.cache_clear()


def checkpoint(folder: Path) -> Path:
    (folder / "actor" / "optimizer").mkdir(parents=True)
    (folder / "actor" / "model.safetensors").write_bytes(b"w" * 5000)
    (folder / "actor" / "optimizer" / "rank_0").write_bytes(b"o" * 300)
    (folder / "empty.txt").touch()
    (folder / "manifest.json").write_text(json.dumps({"step": 3}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_urls_are_told_from_paths_hub_names_and_code() -> None:
    for url in ("s3://bucket/x", "hdfs://host:9000/x", "file:///x", "memory://x", "simplecache::s3://bucket/x"):
        assert storage.is_remote(url)
    for path in (
        "/data/x",
        "./x",
        "x.parquet",
        "org/name",
        "org/name:configuration:split",
        "org/name::split",
        "pkg://m:f",
    ):
        assert not storage.is_remote(path)
    assert not storage.is_remote(Path("/data/x"))


def test_a_folder_goes_up_and_comes_down_as_it_was(place: str, tmp_path: Path) -> None:
    local = checkpoint(tmp_path / "global_step_3")
    url = storage.join(place, "global_step_3")
    storage.upload_folder(local, url)
    assert storage.list_folders(place) == ["global_step_3"]
    assert storage.list_files(url) == {name: len(data) for name, data in contents(local).items()}
    assert storage.exists(storage.join(url, "manifest.json"))
    assert storage.is_folder(url)
    storage.download_folder(url, tmp_path / "back" / "global_step_3")
    assert contents(tmp_path / "back" / "global_step_3") == contents(local)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["global_step_3"], "nothing unfinished is left"
    with pytest.raises(StorageError, match="exists"):
        storage.download_folder(url, tmp_path / "back" / "global_step_3")
    storage.remove_folder(url)
    assert storage.list_folders(place) == []
    assert not storage.exists(url)


def test_what_says_that_all_is_there_comes_last_and_goes_first(place: str, tmp_path: Path, monkeypatch) -> None:
    local = checkpoint(tmp_path / "global_step_3")
    storage.upload_folder(local, place)
    system, _ = storage.filesystem(place)
    put = type(system).put_file

    def fails_at_the_model(self, lpath, rpath, **kwargs):
        if lpath.endswith("model.safetensors"):
            raise OSError(28, "No space left on device")
        return put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(type(system), "put_file", fails_at_the_model)
    with pytest.raises(StorageError, match=r"model.safetensors cannot be written: OSError.*No space left"):
        storage.upload_folder(local, place)
    assert not storage.exists(storage.join(place, "manifest.json"))


def test_a_file_that_arrives_shorter_is_an_error(place: str, tmp_path: Path, monkeypatch) -> None:
    local = checkpoint(tmp_path / "global_step_3")
    system, _ = storage.filesystem(place)
    put = type(system).put_file

    def cuts(self, lpath, rpath, **kwargs):
        put(self, lpath, rpath, **kwargs)
        if lpath.endswith("model.safetensors"):
            self.pipe_file(rpath, b"w" * 10)

    monkeypatch.setattr(type(system), "put_file", cuts)
    with pytest.raises(StorageError, match="5000 bytes were sent, and the store has 10 bytes"):
        storage.upload_folder(local, place)
    assert not storage.exists(storage.join(place, "manifest.json"))


def test_what_is_not_there_has_no_folders_and_cannot_be_fetched(place: str, tmp_path: Path) -> None:
    assert storage.list_folders(place) == []
    assert storage.list_files(place) == {}
    assert not storage.exists(place)
    with pytest.raises(StorageError, match="there is no file"):
        storage.download_folder(place, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(StorageError, match="there is no such file"):
        storage.read_text(storage.join(place, "tracker.txt"))


def test_small_files_are_written_over(place: str) -> None:
    tracker = storage.join(place, "latest.txt")
    storage.write_text(tracker, "3")
    storage.write_text(tracker, "6\n")
    assert storage.read_text(tracker) == "6\n"


def test_patterns_and_folders_name_urls(place: str) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "notes.txt"):
        storage.write_text(storage.join(place, name), name)
    assert [storage.name_of(url) for url in storage.matching(storage.join(place, "*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    found = storage.matching(storage.join(place, "**", "*.jsonl"))
    assert [storage.name_of(url) for url in found] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [storage.read_text(url) for url in found] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [storage.name_of(url) for url in storage.files_in(place)] == ["a.jsonl", "b.jsonl", "notes.txt"]


def test_a_path_of_this_machine_is_its_own_copy(tmp_path: Path, cached: Path) -> None:
    assert storage.localize("some/model") == "some/model"
    assert storage.localize(tmp_path) == str(tmp_path)
    assert not cached.exists()


def test_a_url_is_fetched_once_and_again_when_it_changes(place: str, tmp_path: Path, cached: Path, monkeypatch) -> None:
    storage.upload_folder(checkpoint(tmp_path / "model"), place)
    fetched = []
    fetch = folders.fetch
    monkeypatch.setattr(cache, "fetch", lambda url, *rest: (fetched.append(url), fetch(url, *rest)))
    first = storage.localize(place)
    assert contents(Path(first)) == contents(tmp_path / "model")
    cache._localized.cache_clear()
    assert storage.localize(place) == first
    assert fetched == [place]

    storage.write_text(storage.join(place, "manifest.json"), '{"step": 44}')
    assert storage.localize(place) == first, "one process sees one content"
    cache._localized.cache_clear()
    second = storage.localize(place)
    assert second != first
    assert (Path(second) / "manifest.json").read_text() == '{"step": 44}'
    assert (Path(first) / "manifest.json").read_text() == '{"step": 3}', "who uses the old copy keeps it"


def test_a_copy_that_is_there_can_be_had_from_a_cache_that_cannot_be_written(place: str, cached: Path, monkeypatch):
    storage.write_text(storage.join(place, "reward.py"), "x = 1")
    local = storage.localize(storage.join(place, "reward.py"))
    cache._localized.cache_clear()

    def read_only(self, *args, **keys):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "open"):
        monkeypatch.setattr(Path, name, read_only)
    assert storage.localize(storage.join(place, "reward.py")) == local


def test_a_damaged_copy_is_fetched_again(place: str, tmp_path: Path, cached: Path) -> None:
    storage.upload_folder(checkpoint(tmp_path / "model"), place)
    copy = Path(storage.localize(place))
    (copy / "actor" / "model.safetensors").write_bytes(b"w")
    cache._localized.cache_clear()
    assert contents(Path(storage.localize(place))) == contents(tmp_path / "model")


def test_a_url_of_one_file_is_a_file(place: str, cached: Path) -> None:
    storage.write_text(storage.join(place, "reward.py"), "x = 1")
    local = Path(storage.localize(storage.join(place, "reward.py")))
    assert local.name == "reward.py"
    assert local.read_text() == "x = 1"


@pytest.mark.parametrize("name", ["a" * 249 + ".jsonl", "\u8bad\u7ec3" * 40 + ".jsonl"])
def test_a_name_as_long_as_one_can_be_is_fetched_like_any(tmp_path: Path, cached: Path, name: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).write_text("x")
    local = Path(storage.localize(f"file://{tmp_path}/store/{name}"))
    assert (local.name, local.read_text()) == (name, "x")


def test_an_interrupted_download_leaves_no_copy_and_goes_on(
    place: str, tmp_path: Path, cached: Path, monkeypatch
) -> None:
    storage.upload_folder(checkpoint(tmp_path / "model"), place)
    system, _ = storage.filesystem(place)
    get, asked = type(system).get_file, []

    def breaks(self, rpath, lpath, **kwargs):
        asked.append(Path(rpath).name)
        if rpath.endswith("model.safetensors") and asked.count("model.safetensors") == 1:
            Path(lpath).write_bytes(b"w" * 17)
            raise ConnectionError("the store went away")
        return get(self, rpath, lpath, **kwargs)

    monkeypatch.setattr(type(system), "get_file", breaks)
    monkeypatch.setattr(folders, "_PARALLEL", 1)
    with pytest.raises(StorageError, match="cannot be fetched: ConnectionError: the store went away"):
        storage.localize(place)
    assert not [path for path in cached.rglob("*") if path.is_dir() and len(path.name) == 20], "no copy yet"
    assert contents(Path(storage.localize(place))) == contents(tmp_path / "model")
    assert asked.count("model.safetensors") == 2
    assert not list(cached.rglob("*.fetching"))


def test_several_that_ask_at_once_fetch_once(place: str, tmp_path: Path, cached: Path, monkeypatch) -> None:
    storage.upload_folder(checkpoint(tmp_path / "model"), place)
    fetched, found = [], []
    fetch = folders.fetch
    monkeypatch.setattr(cache, "fetch", lambda url, *rest: (fetched.append(url), fetch(url, *rest)))
    # The inner function, since processes do not share what one remembers.
    ask = cache._localized.__wrapped__
    threads = [threading.Thread(target=lambda: found.append(ask(place))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(fetched) == 1


def test_unknown_protocols_and_missing_packages_are_sentences() -> None:
    with pytest.raises(StorageError, match=r"fsspec knows no places of nowhere://"):
        storage.exists("nowhere://bucket/x")
    if "s3" in fsspec.available_protocols() and not _has("s3fs"):
        with pytest.raises(StorageError, match=r"by the package s3fs, which is not installed: pip install .burnish.s3"):
            storage.exists("s3://bucket/x")


def test_places_of_hdfs_are_opened_by_the_driver_of_arrow() -> None:
    assert fsspec.get_filesystem_class("hdfs").__module__ == "fsspec.implementations.arrow"


def test_passwords_and_signatures_are_not_shown(monkeypatch) -> None:
    url = "s3://AKIA123456:verysecret@bucket/model?X-Amz-Signature=abcdef123456"
    assert storage.shown(url) == "s3://<redacted>@bucket/model?..."

    def refuses(self, path, **kwargs):
        raise PermissionError("403 for https://me:verysecret@host/x?part=2&X-Amz-Signature=abcdefgh99&token=abcdefgh99")

    monkeypatch.setattr(MemoryFileSystem, "find", refuses)
    with pytest.raises(StorageError) as caught:
        storage.list_files("memory://me:verysecret@host/x")
    assert "verysecret" not in str(caught.value)
    assert "abcdefgh99" not in str(caught.value)
    assert "PermissionError" in str(caught.value)


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def test_a_file_that_comes_and_goes_piece_by_piece_gives_signs_of_life(tmp_path: Path, monkeypatch) -> None:
    ticks: list[int] = []
    monkeypatch.setattr(folders.progress, "tick", lambda: ticks.append(1))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"w" * 3 * 2**20)
    url = f"memory://{uuid.uuid4().hex}/store"
    storage.upload_folder(tmp_path / "model", url, last=())
    sent = len(ticks)
    storage.download_folder(url, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(tmp_path / "model")
    assert sent >= 1
    assert len(ticks) > sent
