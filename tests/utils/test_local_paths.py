"""Any text may be asked whether it is a path."""

import os
from pathlib import Path

import pytest

from burnish.utils import local_paths
from burnish.utils.errors import ConfigError

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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "~no_such_user/x",
            "--out=~no_such_user/x: there is no user no_such_user on this machine .* or write ./~no_such",
        ),
        ("~no_such_user", "--out=~no_such_user: there is no user no_such_user"),
        ("a\0b", r"--out=a\\0b: there is a character in it that no name of a file can have"),
        ("a\ud83db", r"--out=a\\ud83db: there is a character in it"),
        ("runs/a\n", r"--out=runs/a\\n: there is a line break in it, and nothing here is called so"),
    ],
)
def test_a_path_that_cannot_be_is_refused_with_the_option_that_names_it(path, said):
    with pytest.raises(ConfigError, match=said):
        local_paths.named("--out", path)


@pytest.mark.parametrize("path", ["a", "./~no_such_user/x", "a/~no_such_user", "/", "", "\udc80"])
def test_whatever_a_file_may_be_called_is_taken_as_it_is(path):
    assert local_paths.named("--out", path) == Path(path)


@pytest.fixture
def homeless(monkeypatch):
    """A user of whom the machine knows nothing, as containers start programs."""
    import pwd

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_user_without_a_home_is_told_so(homeless, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="--out=~/x: ~ is the home of the user, who has none here. Set HOME"):
        local_paths.named("--out", "~/x")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME=~/.cache: ~ is the home of the user, who has none here"):
        local_paths.user_cache("downloads")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert local_paths.user_cache("downloads") == tmp_path / "burnish" / "downloads"


def test_a_file_whose_name_has_a_line_break_is_one(tmp_path):
    file = tmp_path / "two\nlines"
    file.touch()
    assert local_paths.named("--out", file) == file
