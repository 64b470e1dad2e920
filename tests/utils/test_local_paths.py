"""Any text may be asked whether it is a path."""

import os

import pytest

from burnish.utils import local_paths

NO_PATHS = ["x" * 5000, "/" + "x" * 5000, "a/" * 3000, "nul\0inside", "~no_such_user/file", "", "\ud83d", "org/model"]


@pytest.mark.parametrize("text", NO_PATHS, ids=lambda text: f"{len(text)} characters")
@pytest.mark.parametrize("question", [local_paths.exists, local_paths.is_file, local_paths.is_dir])
def test_what_cannot_be_a_path_is_none_and_no_error(question, text):
    assert question(text) is False


def test_files_and_folders_are_told_apart_and_the_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for file, folder in (("~/file", "~"), (tmp_path / "file", tmp_path)):
        assert (local_paths.is_file(file), local_paths.is_dir(file), local_paths.exists(file)) == (True, False, True)
        assert (local_paths.is_file(folder), local_paths.is_dir(folder), local_paths.exists(folder)) == (
            False,
            True,
            True,
        )
    assert local_paths.expanded("~/file") == tmp_path / "file"
    assert os.fspath(local_paths.expanded("~no_such_user/file")) == "~no_such_user/file"
