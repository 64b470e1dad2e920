"""What the loggers of services have in common that keep a curve on a server and only append to it."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from burnish.utils.secrets import redact_text
from burnish.utils.tracking.base import RunInfo, ServiceState, optional

logger = logging.getLogger("burnish.tracking")

GENERATIONS = "val/generations"
"""Name of the table of validation responses."""


class ServiceLogger:
    """Sends each step once, also where a run goes on from a checkpoint behind which the service has steps already.

    A subclass has a ``name``, connects in ``_start`` and sends in ``_send`` and ``_send_generations``.

    Args:
        info: the run.

    Raises:
        ConfigError: the service's package is not installed.
    """

    name: ClassVar[str]

    def __init__(self, info: RunInfo) -> None:
        self._module: Any = optional(self.name)
        self._state = ServiceState(self.name, info)
        with _shown_arguments():
            run_id = self._start(info, self._state.run_id)
        self._state.remember(run_id)
        if self._state.last_step > info.resumed_step:
            logger.warning(
                "%s has this run's steps up to %d already; they are run again from step %d on, and %s keeps what it has.",
                *(self.name, self._state.last_step, info.resumed_step + 1, self.name),
            )

    def _start(self, info: RunInfo, run_id: str | None) -> str:
        """Connects, and returns the service's name of the run: ``run_id``, where that is given."""
        raise NotImplementedError

    def _send(self, data: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def _send_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        raise NotImplementedError

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Sends the metrics of ``step``, unless the service has them."""
        if not self._state.has(step):
            self._send(data, step)
            self._state.sent(step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Sends a validation's responses as a table, unless the service has that step."""
        if not self._state.has(step):
            self._send_generations(rows, step)

    def finish(self) -> None:
        """Waits until everything is sent."""
        raise NotImplementedError


@contextmanager
def _shown_arguments() -> Iterator[None]:
    """Hides secrets of the command line in the block, since packages send it along; the trainer waits for them meanwhile."""
    before = sys.argv
    sys.argv = [redact_text(argument) for argument in before]
    try:
        yield
    finally:
        sys.argv = before
