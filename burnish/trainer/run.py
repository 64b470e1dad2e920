"""The life of a run in one process: start, train, and end with a sentence, or start again from the last checkpoint."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.trainer.cluster import cluster
from burnish.trainer.ending import ended_by, signal_name, something_to_lose, stop_status
from burnish.trainer.own_folders import own_folders
from burnish.trainer.restarts import Failure, Restarts, WrittenSince, failure_of
from burnish.trainer.supervised import in_supervision, report_failure, run_started

if TYPE_CHECKING:
    from burnish.trainer.loop import TrainingLoop
    from burnish.trainer.ppo.stages import StepReport

logger = logging.getLogger("burnish.trainer")

C = TypeVar("C", PPOTrainerConfig, SFTTrainerConfig)

_SECONDS_BEFORE_A_RESTART = 5.0
"""So that what the workers held is free again."""


@dataclass(kw_only=True)
class Parts:
    """Objects that a Python caller may give instead of naming them in the configuration."""

    train_rows: list[dict[str, Any]] | None = None
    val_rows: list[dict[str, Any]] | None = None
    reward_fn: Callable[..., Any] | None = None
    callbacks: tuple[Callable[[StepReport], None], ...] = ()


@dataclass(kw_only=True)
class RunSummary:
    """What a run leaves behind.

    Attributes:
        run_dir: where its files are.
        steps: the last step that was begun.
        metrics: of the last step that ended.
        status: 0, or the exit status of what stopped it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 75 for the end of
            its time.
        ending: how it ended, in a sentence.
    """

    run_dir: str
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    status: int = 0
    ending: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its last step."""
        return self.status != 0

    @property
    def trained(self) -> bool:
        """Whether there was a step: not where the checkpoint is of the last one already, or where validation is all."""
        return "training/global_step" in self.metrics


def live(config: C, build: Callable[[C], TrainingLoop]) -> RunSummary:
    """Trains to the end, with as many attempts as ``trainer.max_restarts`` allows.

    Where a supervisor has started this process (`burnish.trainer.supervisor`) there is one attempt, and the next one gets a
    process of its own.

    Args:
        build: makes a trainer, everything checked that can be, no worker started.

    Raises:
        BurnishError: what ended the last attempt.
    """
    allowed = config.trainer.max_restarts
    restarts = Restarts(0 if in_supervision() else allowed)
    started = run_started()
    while True:
        trainer = build(config)
        trainer.checkpoints.stop.count_from(started)
        written = WrittenSince(trainer.checkpoints.root)
        with own_folders(config):
            try:
                summary = _attempt(config, trainer)
                trainer.run_log.events.write("end", summary.ending, step=summary.steps, status=summary.status)
                return summary
            except Exception as error:
                failure = failure_of(error, step=trainer.global_steps, stage=trainer.current_stage)
                refusal = restarts.refusal(failure)
                _tell(trainer, failure, refusal)
                if refusal is not None:
                    report_failure(failure)
                    raise
                config = resuming(config) if written else config
            restarts.take(failure)
            logger.warning("%s Starting again (%d of %d).", failure.message, restarts.taken, restarts.allowed)
            time.sleep(_SECONDS_BEFORE_A_RESTART)


def resuming(config: C) -> C:
    """The same run, to be gone on with from the checkpoint that it wrote last."""
    config = copy.deepcopy(config)
    config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    return config


def _attempt(config: PPOTrainerConfig | SFTTrainerConfig, trainer: TrainingLoop) -> RunSummary:
    # Not above: whoever asks for what is wrong gets the answer before torch is loaded.
    from burnish.trainer.watch import RunWatch

    status, ending = 0, ""
    try:
        with (
            something_to_lose(),
            RunWatch(trainer, trainer.checkpoints.root, trainer.run_log.events, config.trainer.stage_timeout) as watch,
            cluster(config) as ray_here,
        ):
            watch.looks_at(ray_here)

            def shutdown() -> None:
                watch.ending()
                trainer.shutdown()

            with ended_by(shutdown, "The run's workers and logs"):
                trainer.init_workers()
                trainer.fit()
                status, ending = trainer.checkpoints.how_it_ended()
    except KeyboardInterrupt as stop:
        if not ending:
            status = stop_status(stop)
            ending = f"Stopped by {signal_name(status - 128)} {place(trainer)}."
        # Else all was saved and said, and only the ending of processes is cut short.
    return RunSummary(
        run_dir=str(trainer.checkpoints.root),
        steps=trainer.global_steps,
        metrics=trainer.metrics,
        status=status,
        ending=ending,
    )


def _tell(trainer: TrainingLoop, failure: Failure, refusal: str | None) -> None:
    """Writes into the run's events what went wrong and what follows."""
    events = trainer.run_log.events
    said: dict[str, Any] = {"step": failure.step, "stage": failure.stage}
    if failure.kind != "error":
        events.write(failure.kind, failure.message, **said)
    if refusal is None:
        events.write("restart", f"Started again after: {failure.message}", **said)
    else:
        events.write("end", f"Failed {place(trainer)}: {failure.message}", status=1, error=failure.what, **said)


def place(trainer: TrainingLoop) -> str:
    """Where a run stands, in words: its step and the stage of it."""
    step = f"in step {trainer.global_steps}" if trainer.global_steps else "before the first step"
    return f"{step} (stage: {trainer.current_stage})"
