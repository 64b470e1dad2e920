"""Signs of life: what each worker's process is doing, since when, and when it last got further.

A `Pulse` lives in the worker's process and is told of the stages by its `WorkerHost`; the stages' own code calls
`burnish.utils.progress.tick`. A `Beat` is what the driver hears of it, a few hundred bytes every two seconds.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from burnish.utils import progress

SECONDS_BETWEEN_BEATS = 2.0
IDLE = "waits for the driver"
"""The stage of a worker that has nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a worker's process said of itself.

    Attributes:
        number: counts the beats; two with the same number are the same one.
        stage: the method that runs, with its role; `IDLE` between two.
        since: when the stage began, in seconds of the Unix time there.
        idle: seconds since the process last got further, when it said so.
        node: address of its machine.
    """

    number: int
    stage: str
    since: float
    idle: float
    pid: int
    node: str


class Pulse:
    """What this process is doing."""

    def __init__(self, node: str = "127.0.0.1") -> None:
        self.node = node
        self._stage, self._since = IDLE, time.time()
        self._number = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The block is the stage ``name``."""
        before = self._stage, self._since
        progress.tick()
        self._stage, self._since = name, time.time()
        try:
            yield
        finally:
            progress.tick()
            self._stage, self._since = before[0], time.time()

    def beat(self) -> Beat:
        """What there is to say now."""
        self._number += 1
        return Beat(
            number=self._number,
            stage=self._stage,
            since=self._since,
            idle=progress.idle_seconds(),
            pid=os.getpid(),
            node=self.node,
        )


class Listener:
    """Remembers the last beat of each worker and when it was heard, so that the clocks of two machines are never compared."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Beat, float]] = {}
        self._lock = threading.Lock()

    def hear(self, name: str, beat: Beat) -> None:
        """The newest beat of the worker ``name``; one that was heard before changes nothing."""
        with self._lock:
            known = self._heard.get(name)
            if known is None or known[0].number != beat.number:
                self._heard[name] = beat, time.monotonic()

    @property
    def beats(self) -> dict[str, Beat]:
        """The last beat of each worker, by its name."""
        with self._lock:
            return {name: beat for name, (beat, _) in self._heard.items()}

    def idle_seconds(self, name: str) -> float | None:
        """Seconds since the worker last got further, so far as is known: a process that says nothing gets no further. None where
        it was never heard."""
        with self._lock:
            known = self._heard.get(name)
        return None if known is None else known[0].idle + time.monotonic() - known[1]
