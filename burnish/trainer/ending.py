"""How a command ends: as a sentence and an exit status, whether it finished, failed or was stopped.

| status | the command |
|---|---|
| 0 | finished |
| 1 | failed while it ran |
| 2 | was asked for something that cannot be: a key, a value, a file, a model, or more than the machine has |
| 75 | ended since its time was over (`trainer.max_wall_time`, or the machine's), and is to be gone on with |
| 129 | was ended by SIGHUP: its terminal was closed |
| 130 | was ended by Ctrl-C (SIGINT) |
| 143 | was ended by SIGTERM, as a job scheduler sends it |
"""

from __future__ import annotations

import errno
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import ClassVar

from burnish.trainer.restarts import causes, is_disk_full
from burnish.utils import env
from burnish.utils.console import error_console, readers_may_leave
from burnish.utils.errors import BurnishError, ConfigError, DataError, ModelError, ResourceError, StalledError
from burnish.utils.foreign_code import Caught, told
from burnish.utils.interrupts import end_now, is_importing
from burnish.utils.secrets import HidingFormatter, redact_text
from burnish.utils.wording import without_endless_words

logger = logging.getLogger("burnish.trainer")

_WRONG_REQUEST = (ConfigError, DataError, ModelError, ResourceError)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_OF_AN_ECHO = 1.0
"""In which a second signal is the first one once more: `timeout` sends it to the process and to its group, and a scheduler to
every process of a job, which reaches a run directly and by its supervisor."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a run as Ctrl-C does.

    Args:
        number: the signal.
    """

    raised: ClassVar[list[int]] = []
    """Each that was made: native code may catch it and raise a KeyboardInterrupt of its own, as Ray's does."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number
        Terminated.raised.append(number)


def stop_status(stop: KeyboardInterrupt) -> int:
    """The exit status of a command that ``stop`` ended: 128 + the signal's number."""
    return 128 + (stop.number if isinstance(stop, Terminated) else signal.SIGINT)


def signal_name(number: int) -> str:
    """The signal, as whoever sends it calls it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_status(
    command: Callable[[], int],
    *,
    when_stopped: str = "Stopped before training began.",
    needs_readers: bool = True,
) -> int:
    """Runs a command; what ends it early is said in a sentence on standard error.

    Args:
        command: returns its exit status.
        when_stopped: what is said where Ctrl-C, SIGTERM or SIGHUP ended it and it has not said so itself.
        needs_readers: whether it is in vain once nobody reads what it prints. A run is not, whose files tell all of it, nor is a
            server.
    """
    with nullcontext() if needs_readers else readers_may_leave():
        return _exit_status(command, when_stopped)


def _exit_status(command: Callable[[], int], when_stopped: str) -> int:
    env.calm_threads()
    _log_to_stderr()
    try:
        with _signals_raise(when_stopped):
            return command()
    except KeyboardInterrupt as stop:
        # What has stopped it may have been the end of its terminal.
        with readers_may_leave():
            error_console.print(when_stopped)
        return stop_status(stop)
    except BurnishError as error:
        return _answer(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _answer(
                ConfigError(f"{error.filename}: no file or folder can have so long a name. Name a shorter one.")
            )
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
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    error_console.print(f"{kind.__name__}: {without_endless_words(redact_text(said))}", soft_wrap=True)


def _log_to_stderr() -> None:
    """Sentences of burnish's own loggers; other packages keep their own ways."""
    burnish_logger = logging.getLogger("burnish")
    if burnish_logger.level == logging.NOTSET:
        burnish_logger.setLevel(logging.INFO)
    if not burnish_logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(HidingFormatter("%(message)s"))
        burnish_logger.addHandler(handler)


class _Raises:
    """The handler of signals that end a command.

    Args:
        when_stopped: what is said where the process is ended at once.
    """

    def __init__(self, when_stopped: str) -> None:
        self._when_stopped = when_stopped
        self._raised = float("-inf")
        self.may_end_at_once = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # A terminal that is closed tells it several times over, and what ends now is not to be interrupted.
            signal.signal(number, signal.SIG_IGN)
        if self.may_end_at_once and is_importing(frame):
            end_now(number, self._when_stopped)
        if time.monotonic() - self._raised < SECONDS_OF_AN_ECHO:
            return
        self._raised = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


@contextmanager
def _signals_raise(when_stopped: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    # What whoever started this has ignored stays so: Ctrl-C in a shell's background, SIGHUP under nohup.
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN and handler is not None]
    raises = _Raises(when_stopped)
    for number in ours:
        signal.signal(number, raises)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextmanager
def something_to_lose() -> Iterator[None]:
    """In the block a signal always raises, also in the midst of an import: what the block has begun has to be ended."""
    handlers = {handler for number in ENDING_SIGNALS if isinstance(handler := signal.getsignal(number), _Raises)}
    before = {handler: handler.may_end_at_once for handler in handlers}
    for handler in handlers:
        handler.may_end_at_once = False
    try:
        yield
    finally:
        for handler, might in before.items():
            handler.may_end_at_once = might


@contextmanager
def keeps_sigterm() -> Iterator[None]:
    """Undoes what the block does to the handling of SIGTERM, where this module handles it (Ray brings its own, which leaves the
    process with the signal's number as its status)."""
    ours = signal.getsignal(signal.SIGTERM)
    if not isinstance(ours, _Raises) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, ours)


@contextmanager
def as_raised() -> Iterator[None]:
    """What the handler of a signal raises while native code waits, as Ray's does, comes out of that code as its cause; SIGTERM as
    a KeyboardInterrupt like any other. In the midst of an import it comes out as an error of that import."""
    terminated = len(Terminated.raised)
    try:
        yield
    except KeyboardInterrupt as stop:
        if type(stop) is KeyboardInterrupt and len(Terminated.raised) > terminated:
            raise Terminated(Terminated.raised[-1]) from None
        raise
    except (SystemError, ImportError, RuntimeError) as error:
        raised = next((cause for cause in causes(error) if isinstance(cause, (StalledError, KeyboardInterrupt))), None)
        if raised is None:
            raise
        raise raised from None


@contextmanager
def ended_by(end: Callable[[], None], what: str) -> Iterator[None]:
    """Calls ``end`` after the block, however that ends; `as_raised` in both.

    Where the block raises, that is what has to be told: what ``end`` raises then, or a signal that cuts it short, is a warning.

    Args:
        what: is ended, in words.
    """
    try:
        with as_raised():
            yield
    except BaseException:
        try:
            with Caught() as caught, as_raised():
                end()
            if caught.error is not None:
                logger.warning("%s could not be ended in order: %s.", what, told(caught.error))
        except KeyboardInterrupt as stop:
            logger.warning("%s: their end was cut short by %s.", what, signal_name(stop_status(stop) - 128))
        raise
    with as_raised():
        end()
