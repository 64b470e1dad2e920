"""Ending a run before its last step without losing anything: signals, and times at which the machine is taken away.

The first Ctrl-C or SIGTERM asks: the run goes on to the next place where nothing is lost, saves, and ends. A second one ends it
at once, unless it comes with the first. SIGHUP asks as well, however often it comes. SIGUSR1 asks for a checkpoint and nothing
else. The same end comes by itself before ``trainer.max_wall_time`` is over, or before the environment says that the machine goes
away.

Where nothing is lost: before a step's first update its stages are given up, since the state after the step before is still
there, and a resumed run repeats them to the bit; from the first update on the step is finished. See docs/checkpoints.md.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from burnish.config import TrainerConfig
from burnish.trainer.ending import ENDING_SIGNALS, SECONDS_OF_AN_ECHO, Terminated, signal_name
from burnish.utils import env
from burnish.utils.interrupts import say

OUT_OF_TIME = 75
"""Exit status of a run that ended since its time was over: EX_TEMPFAIL, "try again"."""

# Unix seconds at which the machine is taken away, as clusters tell it.
DEADLINE_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SLURM_JOB_END_TIME",
)
# Until a save has been measured.
_SECONDS_OF_A_SAVE = 60.0

LEFT_AT_ONCE = ("gen", "gen_max", "reward_model", "reward", "filter", "testing")
"""Stages that a request interrupts where the worker runs in the driver's process. The others are short, or move weights."""
UPDATES = ("update_critic", "update_actor", "update_weights", "train", "save_checkpoint")
"""Stages that are never given up."""


@dataclass(frozen=True)
class Stop:
    """What ends a run early.

    Attributes:
        by: "Ctrl-C", "SIGTERM", "SIGHUP", or what sets the time.
        status: the exit status.
    """

    by: str
    status: int


class StopRun(KeyboardInterrupt):
    """Leaves what the run is doing, to save and end."""


@dataclass(frozen=True)
class Deadline:
    """A time at which the run has to be over, in unix seconds, and what says so."""

    at: float
    by: str


def deadlines(config: TrainerConfig, started: float) -> list[Deadline]:
    """What the configuration and the environment say.

    Args:
        started: when the run began, in unix seconds.
    """
    found = []
    if config.max_wall_time is not None:
        found.append(Deadline(started + config.max_wall_time, f"trainer.max_wall_time={config.max_wall_time:g}"))
    for name in DEADLINE_VARIABLES if config.save_freq > 0 else ():
        text = env.get(name)
        try:
            at = float(text) if text else math.nan
        except ValueError:
            at = math.nan
        # One that has passed is of an older job, whose environment came along.
        if at > started:
            found.append(Deadline(at, name))
    return found


class StopControl:
    """Knows whether the run is asked to stop or to save, and where it may be left.

    Args:
        config: the ``trainer`` section.
        in_process: whether the worker runs in this process, so that leaving a stage ends its work.
        clock: unix seconds.
    """

    def __init__(
        self, config: TrainerConfig, *, in_process: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.asked: Stop | None = None
        self.wants_checkpoint = False
        self.longest_step = 0.0
        self.longest_save: float | None = None
        self._saves = config.save_freq > 0
        self._in_process = in_process
        self._clock = clock
        self._margin = config.esi_redundant_time
        self._config = config
        self.deadlines = deadlines(config, clock())
        self._signalled = float("-inf")
        self._was_told = False
        self._stage = "start"
        self._has_updated = False
        self._step_began = clock()

    def count_from(self, started: float) -> None:
        """The run began at ``started`` (unix seconds), before this attempt at it."""
        self.deadlines = deadlines(self._config, started)

    # ----------------------------------------------------------------------------------------- signals

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 while the block runs, on the main thread only.

        A run that saves nothing has nothing to wait for: there the first three mean what they meant before.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[signal.Signals, Any] = {signal.SIGUSR1: self._on_save}
        if self._saves:
            handlers |= dict.fromkeys(ENDING_SIGNALS, self._on_stop)
        # A handler that was not made in Python cannot be put back.
        before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in handlers}
        ours = {
            number: handler
            for number, handler in handlers.items()
            # Who started the run in the background of a shell has it ignore Ctrl-C, and nohup SIGHUP.
            if before[number] is not None
            and not (number in (signal.SIGINT, signal.SIGHUP) and before[number] is signal.SIG_IGN)
        }
        for number, handler in ours.items():
            signal.signal(number, handler)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, before[number])

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if abs(now - self._signalled) < SECONDS_OF_AN_ECHO:
            return
        # When a terminal is closed, SIGHUP comes from the shell and from the system, and SIGTERM from who ends the session: all
        # of that is one request.
        is_told = number != signal.SIGHUP
        if is_told:
            self._signalled = now
        if is_told and self._was_told:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
        self._was_told |= is_told
        if self.asked is not None:
            if is_told:
                say(f"{signal_name(number)}: saving and ending already ({self.asked.by}). Once more to end at once.")
            return
        self.ask(Stop(signal_name(number), 128 + number))
        say(
            f"{signal_name(number)}: saving and ending as soon as nothing is lost (stage: {self._stage}). "
            f"{'Ctrl-C twice' if number == signal.SIGHUP else 'Once more'} to end at once."
        )
        if self._in_process and not self._has_updated and self._stage in LEFT_AT_ONCE:
            raise StopRun

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.wants_checkpoint = True
        say("SIGUSR1: saving at the end of this step.")

    def ask(self, stop: Stop) -> None:
        """Ends the run at the next place where nothing is lost."""
        self.asked = self.asked or stop

    # ------------------------------------------------------------------------------------------ places

    def begin_step(self) -> None:
        """A step begins."""
        self._step_began = self._clock()
        self._has_updated = False

    def enter(self, stage: str) -> None:
        """A stage begins.

        Raises:
            StopRun: the run is to stop, and may here.
        """
        self._stage = stage
        self._has_updated |= stage in UPDATES
        self.pass_by()

    def pass_by(self) -> None:
        """A place between two pieces of work.

        Raises:
            StopRun: the run is to stop, and may here.
        """
        if self.asked is not None and not self._has_updated:
            raise StopRun

    def has_state(self) -> None:
        """The state after the step has been taken down: from here on it may be left again."""
        self._has_updated = False

    def end_step(self) -> None:
        """A step is over, saved and logged.

        Raises:
            StopRun: the run is to stop.
        """
        self.longest_step = max(self.longest_step, self._clock() - self._step_began)
        if self.asked is not None:
            raise StopRun

    def look_at_clock(self) -> None:
        """Asks the run to stop where another step and a save would not end in time."""
        if self.asked is not None or not self.deadlines:
            return
        first = min(self.deadlines, key=lambda deadline: deadline.at)
        now = self._clock()
        step = max(self.longest_step, now - self._step_began)
        save = _SECONDS_OF_A_SAVE if self.longest_save is None else self.longest_save
        if first.at - now <= step + (save if self._saves else 0.0) + self._margin:
            self.ask(Stop(first.by, OUT_OF_TIME))

    def saved(self, seconds: float) -> None:
        """A save took so long."""
        self.longest_save = max(self.longest_save or 0.0, seconds)
