"""Where the metrics of a step go: ``trainer.logger`` names one or several of console, file, tensorboard, wandb."""

import dataclasses
import importlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from burnish.utils import console
from burnish.utils.errors import ConfigError
from burnish.utils.registry import Registry
from burnish.utils.secrets import redact

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger("burnish.tracking")


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
    """One destination of metrics."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records the metrics of ``step``, in such a way that they survive a kill right after."""

    def finish(self) -> None:
        """Writes out what is left and closes."""


# Packages of the loggers that not every installation has: module to import, name to install.
_PACKAGES = {"tensorboard": ("torch.utils.tensorboard", "tensorboard"), "wandb": ("wandb", "wandb")}

LOGGERS: Registry[Callable[[RunInfo], Logger]] = Registry("logger", "trainer.logger")


class Tracking:
    """Sends the metrics of every step to all loggers of a run.

    Args:
        project_name: groups experiments, where a logger knows that.
        experiment_name: of this run.
        backends: names of loggers, or ``package.module:attribute`` of a callable ``RunInfo -> Logger``.
        run_dir: folder of the run, made if missing.
        config: the configuration, a mapping or a dataclass, for loggers that show it.
        resumed_step: the step that the run goes on from; 0: it starts afresh, and an older log in the folder is set aside.

    Raises:
        ConfigError: no such logger, or its package is not installed; nothing is left open then.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: Sequence[str] | str,
        run_dir: str | os.PathLike,
        config: Any = None,
        resumed_step: int = 0,
    ) -> None:
        names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends))
        makers = [LOGGERS.get(name) for name in names]
        info = RunInfo(project_name, experiment_name, Path(run_dir), config, resumed_step)
        info.run_dir.mkdir(parents=True, exist_ok=True)
        self.loggers: list[Logger] = []
        with ExitStack() as stack:
            for make in makers:
                self.loggers.append(make(info))
                stack.callback(self.loggers[-1].finish)
            self._open = stack.pop_all()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Records metrics: numbers, or zero-dimensional arrays or tensors of one.

        Raises:
            TypeError: a metric is no number.
        """
        numbers = {key: _number(key, value) for key, value in data.items()}
        for logger in self.loggers:
            logger.log(numbers, step)

    def finish(self) -> None:
        """Closes every logger, also when one of them fails; a second call does nothing."""
        self._open.close()


def _number(key: str, value: Any) -> int | float:
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"The metric {key!r} is {value!r} and not a number.")
    return number


@LOGGERS.register("console")
class ConsoleLogger:
    """One line a step: what a person watches, every validation result, and every counter of trouble that is not 0."""

    HEADLINES: Mapping[str, str] = {
        "critic/score/mean": "score",
        "critic/rewards/mean": "reward",
        "actor/pg_loss": "pg_loss",
        "actor/kl_loss": "kl_loss",
        "actor/entropy": "entropy",
        "actor/grad_norm": "grad_norm",
        "critic/vf_loss": "vf_loss",
        "response_length/mean": "length",
        "timing_s/step": "seconds",
        "perf/throughput": "tokens/s/gpu",
    }
    TROUBLE = ("_count", "skipped_updates", "empty_updates")

    def __init__(self, info: RunInfo) -> None:
        pass

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Prints the line of ``step``."""
        console.console.print(self.line(data, step), soft_wrap=True)

    def line(self, data: Mapping[str, float], step: int) -> str:
        """The text for ``step``; a batch of unknown metrics is shown whole."""
        shown = {label: data[key] for key, label in self.HEADLINES.items() if key in data}
        shown |= {key: value for key, value in data.items() if key.startswith(("val/", "val-core/"))}
        shown |= {key: value for key, value in data.items() if key.endswith(self.TROUBLE) and value}
        return "  ".join([f"step {step}", *(f"{key} {value:.4g}" for key, value in (shown or data).items())])

    def finish(self) -> None:
        """Nothing is open."""


@LOGGERS.register("file")
class FileLogger:
    """``metrics.jsonl``: one JSON object a line, ``{"step": 1, ...}``, with all digits; a resumed run appends.

    Not-a-number and infinities are written as ``NaN`` and ``Infinity``, as Python's json does and reads.
    """

    def __init__(self, info: RunInfo) -> None:
        path = info.run_dir / METRICS_FILE
        _drop_partial_line(path)
        _set_aside_later_lines(path, info.resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Appends the line of ``step`` and hands it to the system."""
        self._file.write(json.dumps({"step": step, **data}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()


def _drop_partial_line(path: Path) -> None:
    """Removes what a killed run left of its last line, to which the next line would stick."""
    if not path.exists():
        return
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _set_aside_later_lines(path: Path, resumed_step: int) -> None:
    """Moves lines of steps that are run again, and all lines before a run from the start, to ``metrics.N.jsonl``."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if resumed_step and json.loads(line).get("step", 0) <= resumed_step]
    if len(kept) == len(lines):
        return
    number = next(n for n in itertools.count(1) if not (path.parent / f"metrics.{n}.jsonl").exists())
    path.rename(path.parent / f"metrics.{number}.jsonl")
    path.write_text("".join(kept), encoding="utf-8")
    logger.warning(
        "%s held %d lines of an earlier run beyond step %d: they are in metrics.%d.jsonl now.",
        *(path, len(lines) - len(kept), resumed_step, number),
    )


@LOGGERS.register("tensorboard")
class TensorboardLogger:
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self, info: RunInfo) -> None:
        module = _optional(*_PACKAGES["tensorboard"])
        self._writer = module.SummaryWriter(str(info.run_dir / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(info.plain_config(), indent=2, default=str)}\n```")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Adds a scalar a metric."""
        for key, value in data.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Closes the event file."""
        self._writer.close()


@LOGGERS.register("wandb")
class WandbLogger:
    """A run on wandb; ``wandb_id`` in the run's folder makes a resumed run continue the same one."""

    def __init__(self, info: RunInfo) -> None:
        module = _optional(*_PACKAGES["wandb"])
        id_file = info.run_dir / "wandb_id"
        known = id_file.read_text().strip() if id_file.exists() else None
        self._run = module.init(
            project=info.project_name,
            name=info.experiment_name,
            config=info.plain_config(),
            dir=str(info.run_dir),
            id=known,
            resume="allow",
        )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Sends the metrics of ``step``."""
        self._run.log(dict(data), step=step)

    def finish(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def check_loggers(names: Sequence[str]) -> None:
    """Every logger is known, and the package that it needs is there.

    Raises:
        ConfigError: one is not; the message has the choices, or the command that installs it.
    """
    for name in names:
        LOGGERS.get(name)
        if name in _PACKAGES:
            _optional(*_PACKAGES[name])


def _optional(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger names {package}, which is not installed: `pip install {package}`, or leave it out."
        ) from error
