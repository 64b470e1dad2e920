"""How far a command is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from burnish.utils.console import error_console

_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that is told a name, how many are done and how many there are."""
    if not error_console.is_terminal:
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console, transient=True) as bar:
        tasks = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield show


class _Lines:
    """Says how far it is where some time has passed since the last line."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            error_console.print(f"{name}: {done} of {total} responses.", soft_wrap=True)
