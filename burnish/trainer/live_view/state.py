"""What a live view knows of the run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.trainer.ppo.bottleneck import Finding, explain, stage_seconds
from burnish.trainer.ppo.stages import StepReport
from burnish.utils.tracking import ConsoleLogger

_KEPT = 400
_PACE_STEPS = 10
_SHOWN_EVENTS = ("warning", "restart", "worker_death", "hang", "signal", "out_of_disk")


@dataclass
class RunState:
    """Collects reports and events; `view` reads it.

    Args:
        total_steps: the run's last step.
        config: the configuration as nested dictionaries.
        run_dir: where its files are.
        clock: seconds, of which differences count.
    """

    total_steps: int
    config: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str = ""
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    """The last one that ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of it."""
    sample: dict[str, Any] = field(default_factory=dict)
    history: dict[str, deque[float]] = field(default_factory=dict)
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The first and the last: their steps and their metrics."""
    notes: deque[tuple[int | None, str]] = field(default_factory=lambda: deque(maxlen=3))
    """The last things that a person should know: step and sentence."""
    checkpoint: int | None = None
    stage: str = "start"
    running_step: int = 0
    bottleneck: Finding | None = None

    def __post_init__(self) -> None:
        self.started = self._last_report = self._stage_began = self.clock()
        self._walls: deque[float] = deque(maxlen=_PACE_STEPS)

    # ---------------------------------------------------------------------------------------- what comes in

    def on_step(self, report: StepReport) -> None:
        """A callback of the trainer."""
        now = self.clock()
        # A validation before training is reported too, as of the step that the run goes on from.
        is_step = "timing_s/step" in report.metrics
        if is_step:
            self._walls.append(now - self._last_report)
        self._last_report = now
        self.step, self.total_steps, self.metrics = report.step, report.total_steps, report.metrics
        if report.sample:
            self.sample = report.sample
        validation = {key: value for key, value in report.metrics.items() if key.startswith(("val-core/", "val/"))}
        if validation:
            self.validations = [*self.validations[:1], (report.step, validation)]
        if not is_step:
            return
        for key, value in report.metrics.items():
            self.history.setdefault(key, deque(maxlen=_KEPT)).append(value)
        findings = explain(report.metrics, self.config)
        self.bottleneck = findings[0] if findings else None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """A listener of the run's events."""
        kind = event.get("kind")
        if kind == "checkpoint":
            self.checkpoint = event.get("step")
        elif kind in _SHOWN_EVENTS:
            self.notes.append((event.get("step"), str(event.get("message", ""))))

    def is_in(self, step: int, stage: str) -> None:
        """Where the trainer is now."""
        now = self.clock()
        if not self._walls and step != self.running_step:
            # The first step begins here, and a resumed run does not begin at 0.
            self._last_report, self.step = now, max(self.step, step - 1)
        if (step, stage) != (self.running_step, self.stage):
            self.running_step, self.stage, self._stage_began = step, stage, now

    # --------------------------------------------------------------------------------------- what is asked for

    @property
    def elapsed(self) -> float:
        """Seconds since the view was made."""
        return self.clock() - self.started

    @property
    def seconds_in_stage(self) -> float:
        """Seconds since the stage was first seen."""
        return self.clock() - self._stage_began

    @property
    def seconds_left(self) -> float | None:
        """By the median of the last steps, with their validations and saves; None before the first has ended."""
        if not self._walls:
            return None
        to_go = statistics.median(self._walls) * (self.total_steps - self.step)
        return max(0.0, to_go - (self.clock() - self._last_report))

    def stages(self) -> list[tuple[str, float]]:
        """Seconds of the stages of the last step, in their order."""
        return [(stage, seconds) for stage, seconds in stage_seconds(self.metrics).items() if seconds > 0]

    def troubles(self) -> dict[str, float]:
        """Counters of the last step that should be 0."""
        return {key: value for key, value in self.metrics.items() if key.endswith(ConsoleLogger.TROUBLE) and value}
