"""Where the numbers and the texts of a run go: its loggers, its dumps and its callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.config import PPOTrainerConfig, to_dict, to_shown_yaml
from burnish.protocol import DataProto
from burnish.trainer.ppo.generations import dump_generations, sample_of, show_generations
from burnish.trainer.ppo.rollout_gap import RolloutGapWatch
from burnish.trainer.ppo.stages import StepReport
from burnish.utils.secrets import redact
from burnish.utils.tracking import Tracking


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
        config: PPOTrainerConfig,
        tokenizer: Any,
        callbacks: tuple[Callable[[StepReport], None], ...],
        total_steps: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.callbacks = callbacks
        self.total_steps = total_steps
        self.logger: Tracking | None = None
        self._rollout_gap = RolloutGapWatch()

    def open(self, run_dir: Path, resumed_step: int) -> None:
        """Opens the loggers and writes the configuration into the run's folder."""
        trainer = self.config.trainer
        self.logger = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            run_dir=trainer.default_local_dir,
            config=redact(to_dict(self.config)),
            resumed_step=resumed_step,
        )
        (run_dir / "config.yaml").write_text(to_shown_yaml(self.config), encoding="utf-8")

    def close(self) -> None:
        """Closes the loggers; safe to call twice."""
        if self.logger is not None:
            self.logger.finish()
            self.logger = None

    def step(self, metrics: dict[str, float], step: int, batch: DataProto | None = None) -> None:
        """The metrics of a step, to every logger and callback, and its batch as text, if there is one."""
        if self.logger is not None:
            self.logger.log(metrics, step=step)
        self._rollout_gap.look(metrics, step)
        folder = self.config.trainer.rollout_data_dir
        if batch is not None and folder:
            dump_generations(batch, self.tokenizer, folder, step)
        if not self.callbacks:
            return
        sample = {} if batch is None else sample_of(batch, self.tokenizer)
        report = StepReport(step=step, total_steps=self.total_steps, metrics=dict(metrics), sample=sample)
        for callback in self.callbacks:
            callback(report)

    def validation(self, batch: DataProto, step: int) -> None:
        """A validation's responses, as many as are asked for, on the console and in a file."""
        num_shown = self.config.trainer.log_val_generations
        if num_shown > 0:
            show_generations(batch, self.tokenizer, num_shown, step)
        if self.config.trainer.validation_data_dir:
            dump_generations(batch, self.tokenizer, self.config.trainer.validation_data_dir, step)
