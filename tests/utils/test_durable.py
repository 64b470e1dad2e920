"""What is said to be on the disk is there."""

import errno
import os
import stat

import pytest

from burnish.utils.durable import write_durably


def fails_on_folders(number: int):
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        real(handle)

    return fsync


def test_a_file_system_that_flushes_files_alone_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fails_on_folders(errno.EINVAL))
    write_durably(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fails_on_folders(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_durably(tmp_path / "file", "text")
