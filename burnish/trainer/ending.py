"""How a command ends: as a sentence and an exit status, whether it finished, failed or was stopped.

| status | the command |
|---|---|
| 0 | finished |
| 1 | failed while it ran |
| 2 | was asked for something that cannot be: a key, a value, a file, a model, or more than the machine has |
| 75 | ended since its time was over (`trainer.max_wall_time`, or the machine's), and is to be gone on with |
| 130 | was ended by Ctrl-C (SIGINT) |
| 143 | was ended by SIGTERM, as a job scheduler sends it |
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

from burnish.trainer.restarts import causes, is_disk_full
from burnish.utils import env
from burnish.utils.console import error_console
from burnish.utils.errors import BurnishError, ConfigError, DataError, ModelError, ResourceError
from burnish.utils.secrets import HidingFormatter, redact_text

logger = logging.getLogger("burnish.trainer")

_WRONG_REQUEST = (ConfigError, DataError, ModelError, ResourceError)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""

    raised: ClassVar[int] = 0
    """How often: native code may catch it and raise a KeyboardInterrupt of its own, as Ray's does."""

    def __init__(self) -> None:
        super().__init__()
        Terminated.raised += 1


def stop_status(stop: KeyboardInterrupt) -> int:
    """The exit status of a command that ``stop`` ended: 128 + the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def exit_status(command: Callable[[], int], *, when_stopped: str = "Stopped before training began.") -> int:
    """Runs a command; what ends it early is said in a sentence on standard error.

    Args:
        command: returns its exit status.
        when_stopped: what is said where Ctrl-C or SIGTERM ended it and it has not said so itself.
    """
    env.calm_threads()
    _log_to_stderr()
    try:
        with _sigterm_raises():
            return command()
    except KeyboardInterrupt as stop:
        error_console.print(when_stopped)
        return stop_status(stop)
    except BurnishError as error:
        return _answer(error)
    except OSError as error:
        if not is_disk_full(error):
            raise
        where = f" for {error.filename}" if error.filename else ""
        error_console.print(
            f"There is no room left on the disk{where}: {error.strerror}. Complete checkpoints are as they were; make room and "
            f"start again to go on from the last one.",
            soft_wrap=True,
        )
        return 1


def _answer(error: BurnishError) -> int:
    chain = list(causes(error))
    for cause in chain:
        if isinstance(cause, _WRONG_REQUEST):
            # In whatever process and stage it was found: what has to be mended is the request.
            _say(cause)
            return 2
    if any(not isinstance(cause, BurnishError) for cause in chain):
        # Not an error that burnish foresaw: whoever mends it needs to see where it came from.
        logger.error("The run failed:", exc_info=error)
    _say(error)
    return 1


def _say(error: BaseException) -> None:
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == BurnishError.__module__)
    error_console.print(f"{kind.__name__}: {redact_text(str(error))}", soft_wrap=True)


def _log_to_stderr() -> None:
    """Sentences of burnish's own loggers; other packages keep their own ways."""
    burnish_logger = logging.getLogger("burnish")
    if burnish_logger.level == logging.NOTSET:
        burnish_logger.setLevel(logging.INFO)
    if not burnish_logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(HidingFormatter("%(message)s"))
        burnish_logger.addHandler(handler)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def keeps_sigterm() -> Iterator[None]:
    """Undoes what the block does to the handling of SIGTERM, where this module handles it (Ray brings its own, which leaves the
    process with the signal's number as its status)."""
    if signal.getsignal(signal.SIGTERM) is not _terminate or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, _terminate)
