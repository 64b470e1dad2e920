"""What a logger is, and what all of them share: names, packages, and the memory of a service that only appends."""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from burnish.utils.errors import ConfigError
from burnish.utils.json_lines import replacing
from burnish.utils.registry import Registry
from burnish.utils.secrets import redact

_STATES = "tracking"
"""Folder in that of the run, for what the services' loggers remember."""


@dataclass(frozen=True)
class RunInfo:
    """What a logger may want to know of the run: names, folder, configuration (a mapping or a dataclass)."""

    project_name: str
    experiment_name: str
    run_dir: Path
    config: Any = None
    resumed_step: int = 0

    def plain_config(self) -> dict[str, Any]:
        """The configuration as plain dicts, its secrets hidden; a dataclass is read only if a logger asks for it."""
        if self.config is None or isinstance(self.config, Mapping):
            return redact(dict(self.config or {}))
        return redact(dataclasses.asdict(self.config))


class Logger(Protocol):
    """One destination of metrics.

    What raises is switched off, and the run goes on; what raises when it is made ends the run before it has begun.

    A logger may have more than these two methods: ``log_generations(rows, step)`` is given a validation's responses, dicts as
    in the dumps; ``log_partial(data, step)`` what there is of a step that failed. Everything of a logger happens in a thread of
    its own, unless its class has the attribute ``in_turn = True``: then each call is a part of the step.
    """

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records the metrics of ``step``, in such a way that they survive a kill right after."""

    def finish(self) -> None:
        """Writes out what is left and closes."""


LOGGERS: Registry[Callable[[RunInfo], Logger]] = Registry("logger", "trainer.logger")

PACKAGES: dict[str, tuple[str, str]] = {}
"""Of the loggers that not every installation can have: the module to import, and the extra that brings it."""


def optional(name: str) -> ModuleType:
    """The module that the logger ``name`` needs.

    Raises:
        ConfigError: it is not installed; the message has the command that installs it.
    """
    module, extra = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {name}, whose package cannot be imported ({error}): `pip install 'burnish[{extra}]'`, "
            f"or leave it out."
        ) from error


def check_loggers(names: Sequence[str]) -> None:
    """Every logger is known, and the package that it needs is there.

    Raises:
        ConfigError: one is not; the message has the choices, or the command that installs it.
    """
    for name in names:
        LOGGERS.get(name)
        if name in PACKAGES:
            optional(name)


class ServiceState:
    """Which run of a service this one is, and up to which step the service has its metrics: ``tracking/<name>.json``.

    A service that only appends cannot take a step twice. What a run that goes on from a checkpoint does again is there already,
    and is not sent a second time; the curve has one value a step. A run from the start is a new one for the service too.

    Args:
        name: of the logger.
        info: the run; ``resumed_step`` 0 forgets what an earlier one left.
    """

    def __init__(self, name: str, info: RunInfo) -> None:
        self._path = info.run_dir / _STATES / f"{name}.json"
        self._resumed_step = info.resumed_step
        self.run_id: str | None = None
        self.last_step = -1
        if info.resumed_step:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                state = json.loads(self._path.read_text(encoding="utf-8"))
                self.run_id, self.last_step = str(state["id"]), int(state["last_step"])

    def remember(self, run_id: str) -> None:
        """Keeps the service's name of the run."""
        self.run_id = run_id
        self._write()

    def has(self, step: int) -> bool:
        """Whether the service has that step. The step that a run goes on from may be added to, by a validation."""
        return step <= self.last_step and step != self._resumed_step

    def sent(self, step: int) -> None:
        """The service has everything of ``step`` now."""
        self.last_step = max(step, self.last_step)
        # A full disk may have room by the next step. A run that is killed before would send some steps twice: better than none.
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps({"id": self.run_id, "last_step": self.last_step}), encoding="utf-8")


TABLE = ("step", "uid", "data_source", "prompt", "response", "score", "ground_truth")
"""Columns of a service's table of validation responses."""


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Responses as rows of `TABLE`: numbers and texts, as every service takes them."""
    return [[_cell(row.get(column)) for column in TABLE] for row in rows]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    # Services speak UTF-8, which has no lone surrogates.
    return str(value).encode("utf-8", "replace").decode("utf-8")
