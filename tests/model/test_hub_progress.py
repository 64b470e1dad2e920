"""A download from the hub that gets on is no hang, and one that stands still is."""

import logging

import pytest

from burnish.model import hub_progress as module
from burnish.model import load
from burnish.model.hub_progress import Download, hub_progress
from burnish.utils.errors import ModelError


@pytest.fixture
def ticks(monkeypatch) -> list[int]:
    counted: list[int] = []
    monkeypatch.setattr(module.progress, "tick", lambda: counted.append(1))
    return counted


def test_what_comes_ticks_and_is_told_every_half_minute(tmp_path, ticks, caplog):
    caplog.set_level(logging.INFO, logger="burnish.model")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "old").write_bytes(b"x" * 100)
    download = Download("org/model", tmp_path, now=0.0)
    for second in range(1, 62):
        with (blobs / "weights.incomplete").open("ab") as file:
            file.write(b"x" * 2**20)
        download.look(float(second))
    assert len(ticks) == 61
    assert [record.getMessage() for record in caplog.records] == [
        "Fetching org/model from the hub: 0.03 GiB so far.",
        "Fetching org/model from the hub: 0.06 GiB so far.",
    ]


def test_a_download_that_stands_still_gives_no_sign_of_life(tmp_path, ticks, caplog):
    caplog.set_level(logging.INFO, logger="burnish.model")
    download = Download("org/model", tmp_path, now=0.0)
    for second in (1, 100, 1000):
        download.look(float(second))
    assert (ticks, caplog.records) == ([], [])


def test_only_a_name_of_the_hub_is_watched_and_the_thread_ends_with_an_error(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_cache_folder", lambda name: asked.append(name) or tmp_path)
    for local in (str(tmp_path), "/nowhere/at/all"):
        with hub_progress(local):
            pass
    assert asked == []
    with pytest.raises(RuntimeError, match="refused"), hub_progress("org/model"):
        raise RuntimeError("refused")
    assert asked == ["org/model"]
    assert not [thread for thread in module.threading.enumerate() if thread.name == "hub-progress"]


def test_loading_a_model_is_watched(monkeypatch):
    asked = []
    monkeypatch.setattr(load, "hub_progress", lambda path: asked.append(path) or hub_progress("/nowhere/at/all"))
    monkeypatch.setattr(load, "load_config", lambda *args, **keys: load.AutoConfig.for_model("llama"))
    monkeypatch.setattr(load, "_loader", lambda *args: lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(ModelError, match="no network"):
        load.load_causal_lm("org/model")
    assert asked == ["org/model"]
