"""Where the numbers and the texts of a run go: its loggers, its dumps and its callbacks."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, to_dict, to_shown_yaml, write_origins
from burnish.protocol import DataProto
from burnish.trainer.live_view import loggers_beside, make_display
from burnish.trainer.ppo.dumps import Dumps
from burnish.trainer.ppo.generations import chosen_rows, sample_of, show_generations
from burnish.trainer.ppo.rollout_gap import RolloutGapWatch
from burnish.trainer.ppo.stages import StepReport
from burnish.trainer.rollout_store import text_rows
from burnish.utils.durable import write_durably
from burnish.utils.events import EventLog
from burnish.utils.foreign_code import Caught, told
from burnish.utils.secrets import redact
from burnish.utils.tracking import Tracking

logger = logging.getLogger("burnish.trainer")


class RunLog:
    """Tells what happens in a run to those who want to know.

    Args:
        config: the whole configuration.
        tokenizer: makes texts of the responses.
        callbacks: called with a `StepReport` after every step.
        total_steps: the run's last step.
    """

    def __init__(
        self,
        config: PPOTrainerConfig | SFTTrainerConfig,
        tokenizer: Any,
        callbacks: tuple[Callable[[StepReport], None], ...],
        total_steps: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.callbacks = callbacks
        self.total_steps = total_steps
        self.logger: Tracking | None = None
        self.events = EventLog(config.trainer.default_local_dir)
        self.display = make_display(config, total_steps)
        if self.display is not None:
            self.callbacks = (self.display.on_step, *callbacks)
            self.events.listeners.append(self.display.on_event)
        self.dumps = Dumps(config.trainer, tokenizer, self.events)
        self._rollout_gap = RolloutGapWatch()

    def show(self, position: Callable[[], tuple[int, str]]) -> None:
        """Begins the live view, where there is one.

        Args:
            position: tells the step and the stage that the trainer is in.
        """
        if self.display is not None:
            self.display.start(position)

    def open(self, run_dir: Path, resumed_step: int) -> None:
        """Opens the loggers and writes the configuration into the run's folder; what it holds of steps that are run again is set
        aside.

        Raises:
            ConfigError: a logger cannot start.
        """
        trainer = self.config.trainer
        self.logger = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            loggers_beside(trainer.console, trainer.logger, self.display),
            run_dir=run_dir,
            config=redact(to_dict(self.config)),
            resumed_step=resumed_step,
            events=self.events,
        )
        self.dumps.open(resumed_step)
        if not resumed_step:
            # One that goes on from a checkpoint is told of as resumed.
            message = f"Started {trainer.project_name}/{trainer.experiment_name}, {self.total_steps} steps."
            self.events.write("start", message, step=0, total_steps=self.total_steps)
        # Whole or not at all: who evaluates a checkpoint of the run reads how its responses were sampled.
        write_durably(run_dir / "config.yaml", to_shown_yaml(self.config))
        write_origins(self.config, run_dir)

    def close(self) -> None:
        """Writes what is under way and closes the loggers; safe to call twice."""
        if self.display is not None:
            self.display.stop()
        self.dumps.close()
        if self.logger is not None:
            self.logger.finish()
            self.logger = None

    def flush(self) -> None:
        """Waits until what was logged is on the disk."""
        self.dumps.flush()

    def step(self, metrics: dict[str, float], step: int, batch: DataProto | None = None) -> None:
        """The metrics of a step, to every logger and callback, and its batch as text, if there is one."""
        if self.logger is not None:
            self.logger.log(metrics, step=step)
        self._rollout_gap.look(metrics, step)
        self._tell_validation(metrics, step)
        if batch is not None:
            self.dumps.step(batch, step)
        if not self.callbacks:
            return
        sample = {} if batch is None else sample_of(batch, self.tokenizer)
        report = StepReport(step=step, total_steps=self.total_steps, metrics=dict(metrics), sample=sample)
        for callback in self.callbacks:
            callback(report)

    def _tell_validation(self, metrics: dict[str, float], step: int) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith(("val-core/", "val/"))}
        if found:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in list(found.items())[:5])
            self.events.write("validation", f"Validated: {shown}.", step=step, metrics=found)

    def failed_step(self, metrics: dict[str, float], step: int) -> None:
        """What there is of a step that ended in an error, to the loggers that can take it back."""
        if self.logger is not None:
            self.logger.log(metrics, step=step, partial=True)

    @property
    def shows_validation(self) -> bool:
        """Whether a validation's prompts and responses are read."""
        return self.config.trainer.log_val_generations > 0 or bool(self.config.trainer.validation_data_dir)

    def validation(self, batch: DataProto, step: int) -> None:
        """A validation's responses: all of them in a file, some on the console and where loggers have tables."""
        self.dumps.validation(batch, step)
        num_shown = self.config.trainer.log_val_generations
        if num_shown <= 0:
            return
        # It is for looking at: whatever a terminal or a text makes of it, training goes on.
        with Caught() as caught:
            rows = [{"step": step, **row} for row in text_rows(chosen_rows(batch, num_shown), self.tokenizer)]
            if self.logger is not None:
                self.logger.log_generations(rows, step)
            if self.config.trainer.console != "off":
                show_generations(rows, step)
        if caught.error is not None:
            message = f"Responses of the validation at step {step} cannot be shown: {told(caught.error)}."
            logger.warning("%s", message)
            self.events.write("warning", message, step=step)
