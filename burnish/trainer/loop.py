"""What every trainer does around its algorithm: where a run begins, which step comes next, and what follows a step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.config.usage import mark_read
from burnish.trainer.ppo.checkpoints import RunCheckpoints
from burnish.trainer.ppo.profiling import StepProfiler
from burnish.trainer.ppo.prompts import PromptStream
from burnish.trainer.ppo.run_log import RunLog
from burnish.trainer.ppo.stages import StepReport, stage
from burnish.trainer.ppo.step_metrics import log_unfinished_step
from burnish.trainer.ppo.updates import SkippedUpdates
from burnish.utils.timing import marked_timer

logger = logging.getLogger("burnish.trainer")


class TrainingLoop(ABC):
    """The outline of a run. A trainer's ``fit`` puts its stages into it.

    Args:
        config: the whole configuration.
        tokenizer: the model's.
        resource_pool_manager: which processes and devices the models get.
        train_dataloader: one epoch each time that it is iterated.
        val_dataloader: the rows of a validation; None: there is none.
        callbacks: called with a `StepReport` after every step.
    """

    use_critic = False
    train_dataset: Any
    skipped_updates: SkippedUpdates

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        resource_pool_manager: Any,
        train_dataloader: Any,
        val_dataloader: Any,
        callbacks: tuple[Callable[[StepReport], None], ...],
    ) -> None:
        self.config: PPOTrainerConfig | SFTTrainerConfig = config
        self.tokenizer = tokenizer
        self.resource_pool_manager = resource_pool_manager
        self.train_dataloader, self.val_dataloader = train_dataloader, val_dataloader
        self.global_steps = 0
        self.current_stage = "start"
        self.metrics: dict[str, float] = {}
        self.timing_raw: dict[str, float] = {}
        self.is_logged = True
        # Any: a worker's methods become the group's when it is made.
        self.worker_groups: dict[Any, Any] = {}
        self.actor_rollout_wg: Any = None
        self.critic_wg: Any = None
        self.prompts = PromptStream(train_dataloader)
        trainer = config.trainer
        self.total_training_steps: int = trainer.total_training_steps or len(train_dataloader) * trainer.total_epochs
        self.checkpoints = RunCheckpoints(self)
        self.run_log = RunLog(config, tokenizer, callbacks, self.total_training_steps)
        self.profiler = StepProfiler(config.global_profiler, self.checkpoints.root, self.total_training_steps)

    # ---------------------------------------------------------------------------------- what a trainer adds

    @abstractmethod
    def init_workers(self) -> None:
        """Starts the worker processes and loads the models."""

    @abstractmethod
    def fit(self) -> None:
        """Trains until ``trainer.total_training_steps``, from the newest checkpoint if there is one."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of this trainer beside its place in the data."""

    @abstractmethod
    def restore_own_state(self, state: Any) -> None:
        """Goes on with what `own_state` gave."""

    @abstractmethod
    def push_weights(self) -> None:
        """Gives the weights to whoever else works with them."""

    @abstractmethod
    def validation_metrics(self) -> dict[str, float]:
        """What a validation finds."""

    def own_parts(self) -> Sequence[Any]:
        """What is closed with the run beside its workers, the first one last."""
        return ()

    # --------------------------------------------------------------------------------------------- the run

    def _start_run(self) -> None:
        """Resumes, opens the logs, and validates before training if asked to."""
        trainer = self.config.trainer
        self.checkpoints.load()
        self.run_log.open(self.checkpoints.root, self.global_steps)
        is_wanted = trainer.val_before_train or trainer.val_only or self.checkpoints.validation_is_due
        if is_wanted and self.val_dataloader is not None:
            self._run_validation()
            self.checkpoints.end_first_validation()
            self.metrics["timing_s/testing"] = self.timing_raw["testing"]
            self.run_log.step(self.metrics, self.global_steps)

    def _batches(self) -> Iterator[Any]:
        """The data loader's batches, one a step, until the last step."""
        if self.config.trainer.val_only:
            return
        if self.is_last_step:
            logger.warning(
                "Nothing to train: the checkpoint is of step %d, and the run ends at step %d (trainer.total_training_steps).",
                self.global_steps,
                self.total_training_steps,
            )
        while not self.is_last_step:
            self.checkpoints.stop.begin_step()
            batch = next(self.prompts)
            self.global_steps += 1
            yield batch

    @property
    def is_last_step(self) -> bool:
        """Whether the current step ends the run."""
        return self.global_steps >= self.total_training_steps

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.metrics, self.timing_raw, self.is_logged = {}, {}, False
        recorded = self.profiler.step(self.global_steps, self.worker_groups.values(), self.run_log.events.write)
        with recorded, marked_timer("step", self.timing_raw):
            yield

    def _gather_config_reads(self) -> None:
        """Keys that workers in other processes have read, for the list of keys that nobody did."""
        for worker_group in self.worker_groups.values():
            mark_read(worker_group.config_reads())

    def shutdown(self) -> None:
        """Ends the worker processes and closes the logs, all of them also where one cannot; safe to call twice."""
        groups, self.worker_groups = self.worker_groups, {}
        with ExitStack() as ending:
            # From the last to the first.
            ending.callback(self.run_log.close)
            for part in self.own_parts():
                if close := getattr(part, "close", None):
                    ending.callback(close)
            ending.callback(self.resource_pool_manager.shutdown)
            for worker_group in reversed(groups.values()):
                ending.callback(worker_group.shutdown)
            log_unfinished_step(self)

    # ----------------------------------------------------------------------------------------- after a step

    def _is_due(self, freq: int) -> bool:
        return freq > 0 and (self.global_steps % freq == 0 or self.is_last_step)

    def _validate(self) -> None:
        """Validation metrics, every ``trainer.test_freq`` steps and at the end."""
        if self.val_dataloader is not None and self._is_due(self.config.trainer.test_freq):
            with self.checkpoints.leaves_validation():
                self._run_validation()

    @stage("testing")
    def _run_validation(self) -> None:
        self.metrics |= self.validation_metrics()

    def _save_checkpoint(self) -> None:
        """A checkpoint every ``trainer.save_freq`` steps, at the end, and whenever else one is due."""
        if self.checkpoints.is_due():
            self._write_checkpoint()

    @stage("save_checkpoint")
    def _write_checkpoint(self) -> None:
        self.checkpoints.save()
