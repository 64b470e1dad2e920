"""Keeps the view on the screen without tearing, and leaves the terminal as it was however the run ends."""

from __future__ import annotations

import atexit
import io
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, to_dict
from burnish.trainer.live_view.state import RunState
from burnish.trainer.live_view.view import body, headline
from burnish.trainer.ppo.stages import StepReport
from burnish.utils import console as consoles
from burnish.utils import env

logger = logging.getLogger("burnish.trainer")

_REFRESHES = 2.0
"""A second. Each takes a few milliseconds of the driver."""
_on_screen = threading.Lock()


def console_mode(setting: str, console: Console, *, has_console_logger: bool = True) -> str:
    """What ``trainer.console`` comes to here: live, plain (a line a step) or off.

    Args:
        setting: its value. ``auto`` is live on a terminal that a person looks at, and plain in files, pipes, continuous
            integration (CI), and where colour is not wanted (NO_COLOR) or not known (TERM=dumb).
        has_console_logger: whether ``trainer.logger`` names the console; without it auto is off.
    """
    if setting == "off" or (setting == "auto" and not has_console_logger):
        return "off"
    can_draw = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    if setting == "live":
        if not can_draw:
            logger.warning(
                "trainer.console=live: this is no terminal that could be drawn on; lines are printed instead."
            )
        return "live" if can_draw else "plain"
    unwanted = env.get("NO_COLOR") or env.get("CI", "").lower() not in ("", "0", "false")  # type: ignore[union-attr]
    return "live" if setting == "auto" and can_draw and not unwanted else "plain"


class LiveDisplay:
    """The view of one run, from `start` to `stop`.

    Args:
        state: what it shows.
        console: where.
    """

    def __init__(self, state: RunState, console: Console) -> None:
        self.state = state
        self._position: Callable[[], tuple[int, str]] | None = None
        self._console = console
        self._live: Live | None = None
        self._body: RenderableType | None = None
        self._size: tuple[int, int] | None = None
        self._moved: list[tuple[logging.StreamHandler, IO[str]]] = []
        self._errors_before: Any = None
        # The state is drawn by a thread.
        self._lock = threading.Lock()

    def start(self, position: Callable[[], tuple[int, str]] | None = None) -> None:
        """Begins to draw; where another view is on the screen already, this one stays away.

        Args:
            position: tells step and stage of the trainer; called from a thread.
        """
        self._position = position
        if self._live is not None or not _on_screen.acquire(blocking=False):
            return
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=_REFRESHES,
            transient=False,
            redirect_stdout=True,
            redirect_stderr=_is_terminal(sys.stderr),
            vertical_overflow="crop",
        )
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        atexit.register(self.stop)
        self._live.start()
        # The terminal needs no mending then, whatever ends the process.
        self._console.show_cursor(True)
        self._move_streams([stream for stream in streams if stream is not None and _is_terminal(stream)])

    def stop(self) -> None:
        """Leaves the last view on the screen, and gives streams back; safe to call twice."""
        if self._live is None:
            return
        live, self._live = self._live, None
        atexit.unregister(self.stop)
        try:
            for handler, stream in self._moved:
                handler.setStream(stream)
            self._moved = []
            consoles.error_console.file = self._errors_before
            self._body = None
            live.stop()
        finally:
            _on_screen.release()

    def on_step(self, report: StepReport) -> None:
        """A callback of the trainer."""
        with self._lock:
            self.state.on_step(report)
            self._body = None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """A listener of the run's events."""
        with self._lock:
            self.state.on_event(event)
            self._body = None

    def _render(self) -> RenderableType:
        with self._lock:
            if self._position is not None:
                self.state.is_in(*self._position())
            size = (self._console.width, self._console.height)
            if self._body is None or size != self._size:
                self._body, self._size = body(self.state, self._console), size
            return Group(headline(self.state, self._console), self._body)

    def _move_streams(self, streams: list[IO[str]]) -> None:
        """Sends what loggers and the other console write to the terminal through this one, which prints above the view."""
        through = _Through(self._console)
        self._errors_before = consoles.error_console._file
        if _is_terminal(sys.__stderr__):
            consoles.error_console.file = through  # type: ignore[assignment]
        loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
        for handler in {handler for each in loggers for handler in each.handlers}:
            stream = getattr(handler, "stream", None)
            if isinstance(handler, logging.StreamHandler) and any(stream is one for one in streams):
                self._moved.append((handler, stream))  # type: ignore[arg-type]
                handler.setStream(through)


class _Through(io.TextIOBase):
    """A stream whose lines a console prints."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Lines are printed when they are whole."""

    def isatty(self) -> bool:
        return True


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream is not None and stream.isatty())
    except ValueError:  # It is closed.
        return False


def make_display(config: PPOTrainerConfig | SFTTrainerConfig, total_steps: int) -> LiveDisplay | None:
    """The display of a run where ``trainer.console`` comes to live; None elsewhere."""
    trainer = config.trainer
    mode = console_mode(trainer.console, consoles.console, has_console_logger="console" in trainer.logger)
    if mode != "live":
        return None
    state = RunState(total_steps=total_steps, config=to_dict(config), run_dir=trainer.default_local_dir)
    return LiveDisplay(state, consoles.console)


def loggers_beside(setting: str, names: list[str], display: LiveDisplay | None) -> list[str]:
    """The loggers of ``trainer.logger``, but that of the console where the display takes its place or nothing is to be shown;
    with ``trainer.console=plain`` it is among them in any case.
    """
    if display is not None or setting == "off":
        return [name for name in names if name != "console"]
    return ["console", *names] if setting in ("plain", "live") and "console" not in names else names
