"""The folders that a run writes into are its own while it lives: of two runs in one, each would remove, move away or write over
what the other has."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.trainer.restarts import HEARTBEAT
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError

OWNER = ".burnish_owner"
"""The file in each of them that the run's process has locked; in it the run's folder, whose heartbeat tells whether it lives."""
_KEYS = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
_SECONDS_A_SIGN_COUNTS = 20.0
"""A heartbeat comes every two seconds, later on a busy machine."""


@contextmanager
def own_folders(config: PPOTrainerConfig | SFTTrainerConfig) -> Iterator[None]:
    """No other run writes into the folders of this one while the block runs.

    The locks are the process's: they end with it, however it ends, and what it starts or forks has none of them. On a file system
    that knows no locks, the run's folder is still looked after by `burnish.trainer.start_checks.check_nobody_runs_in`.

    Raises:
        ConfigError: another run, of this machine or of one that sees the same files, has one of them.
    """
    run_dir = local_paths.expanded(config.trainer.default_local_dir).absolute()
    with ExitStack() as ours:
        for key in _KEYS:
            if path := getattr(config.trainer, key):
                ours.enter_context(_own(f"trainer.{key}", local_paths.expanded(path), run_dir))
        yield


@contextmanager
def _own(key: str, folder: Path, run_dir: Path) -> Iterator[None]:
    try:
        handle = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        # Those whose files matter tell what is wrong with the folder.
        yield
        return
    try:
        if _lock(handle):
            with suppress(OSError):
                os.ftruncate(handle, 0)
                os.write(handle, os.fsencode(run_dir))
        else:
            other = Path(os.fsdecode(os.read(handle, 1 << 16)))
            # The lock of a machine that is gone may stay with the file server.
            if any(map(_is_recent, (folder / OWNER, other / HEARTBEAT))):
                raise ConfigError(
                    f"{key}={folder}: another run is writing there (the one in {other}). Name another folder, or wait until that "
                    f"run has ended."
                )
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether nobody else has locked the file."""
    try:
        # Not flock, whose locks go to forked processes as well, which may outlive a run that is killed.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # Not every file system knows locks.
        pass
    return True


def _is_recent(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime < _SECONDS_A_SIGN_COUNTS
    except OSError:
        return False
