"""A trainer's checkpoints: what a step's state is, when it is saved, and how a run ends that is asked to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config import PPOTrainerConfig, policy_of
from burnish.trainer.ppo.checkpoints import resume
from burnish.trainer.ppo.checkpoints.manager import CheckpointManager, Written
from burnish.trainer.ppo.checkpoints.state import belongings, seed_generators, state_of, write_state
from burnish.trainer.preflight.disk import first_checkpoint_bytes
from burnish.trainer.stopping import OUT_OF_TIME, Stop, StopControl, StopRun
from burnish.utils.errors import BurnishError, CheckpointError, ConfigError, WorkerError
from burnish.workers.handed_back import checked

if TYPE_CHECKING:
    from burnish.trainer.loop import TrainingLoop

logger = logging.getLogger("burnish.trainer")


class RunCheckpoints:
    """Takes down the state after every step, saves it when it is time, and goes on from what was saved.

    Args:
        trainer: whose state it is; its parts need not exist yet.

    Attributes:
        manager: the files.
        stop: whether and where the run is asked to end early.
        stopped: what ended it early; None: nothing did.
        ending: how it ended early, in a sentence.
        validation_is_due: whether the step was left before its validation, which the run that goes on makes up for.
    """

    def __init__(self, trainer: TrainingLoop) -> None:
        config = trainer.config
        self.trainer = trainer
        self.stop = StopControl(config.trainer, in_process=config.trainer.controller == "local")
        self.manager = CheckpointManager(
            config.trainer, tell=self.tell, estimate=partial(first_checkpoint_bytes, config)
        )
        self.stopped: Stop | None = None
        self.ending = ""
        self.validation_is_due = False
        self._boundary: tuple[int, dict[str, Any]] | None = None
        self._found: list[Path] | None = None

    @property
    def root(self) -> Path:
        """The run's folder."""
        return self.manager.root

    def tell(self, kind: str, message: str, *, step: int | None = None, **fields: Any) -> None:
        """Adds an event to the run's log."""
        self.trainer.run_log.events.write(kind, message, step=step, **fields)

    @cached_property
    def belongings(self) -> dict[str, Any]:
        """Trainer, model, data and configuration of the run, which a state is saved with."""
        return belongings(self.trainer)

    # ----------------------------------------------------------------------------------------------- resume

    def find(self) -> list[Path]:
        """The checkpoints to go on from, the best first; found once.

        Raises:
            CheckpointError, DataError: see `burnish.trainer.ppo.checkpoints.resume.find`.
        """
        if self._found is None:
            self._found = resume.find(self.manager, self.belongings, needs_critic=self.trainer.use_critic)
        return self._found

    def load(self) -> None:
        """Goes on from a checkpoint, if there is one.

        Raises:
            CheckpointError, DataError: see `burnish.trainer.ppo.checkpoints.resume`.
        """
        seed_generators(self.trainer.config.trainer.seed)
        resume.load(self, self.find())
        # Another start looks anew.
        self._found = None

    # ------------------------------------------------------------------------------------------------- save

    def take_state(self) -> None:
        """Takes down the state at the end of a step's updates; a later save may go back to it."""
        self.validation_is_due = False
        if self.trainer.config.trainer.save_freq > 0 or self.stop.wants_checkpoint:
            self._boundary = (self.trainer.global_steps, state_of(self.trainer))
        self.stop.has_state()

    def is_due(self) -> bool:
        """Whether this step is saved: as ``trainer.save_freq`` says, the last one, one that is the best so far, the one before
        the run stops, or since SIGUSR1 asks for it."""
        trainer, stop = self.trainer, self.stop
        if not trainer.is_last_step:
            stop.look_at_clock()
        if stop.wants_checkpoint:
            return True
        if trainer.config.trainer.save_freq <= 0:
            return False
        return (
            trainer.is_last_step
            or stop.asked is not None
            or self.manager.is_due(trainer.global_steps)
            or self.manager.is_better(trainer.metrics)
        )

    def save(self) -> None:
        """Writes the checkpoint of the step whose state was taken down last; `end_step` gives it its name.

        Raises:
            CheckpointError: see `CheckpointManager.save`.
        """
        trainer, stop = self.trainer, self.stop
        if self._boundary is None or self._boundary[0] != trainer.global_steps:
            # SIGUSR1 came after the state would have been taken down.
            self._boundary = (trainer.global_steps, state_of(trainer))
        step, state = self._boundary
        stop.wants_checkpoint = False
        self.manager.save(
            step,
            partial(self._write, state),
            world_size=trainer.actor_rollout_wg.world_size,
            metrics=trainer.metrics,
            must_succeed=trainer.is_last_step or stop.asked is not None,
        )
        trainer.metrics |= self.manager.metrics()

    def _write(self, state: dict[str, Any], folder: Path) -> list[Written]:
        """Has everything written, and returns what is still at work."""
        trainer = self.trainer
        policy = policy_of(trainer.config).checkpoint
        parts: list[tuple[str, Any, bool]] = [("actor", trainer.actor_rollout_wg, policy.async_save)]
        if isinstance(trainer.config, PPOTrainerConfig) and trainer.critic_wg is not None:
            parts.append(("critic", trainer.critic_wg, trainer.config.critic.checkpoint.async_save))
        working: list[Written] = []
        try:
            for name, group, in_background in parts:
                checked(group.save_checkpoint(f"{folder}/{name}", blocking=not in_background))
                if in_background:
                    working.append(partial(_is_written, group))
            # With its tokenizer the folder is a model like any other.
            trainer.tokenizer.save_pretrained(f"{folder}/actor")
            if "hf_model" in policy.save_contents:
                trainer.tokenizer.save_pretrained(f"{folder}/actor/huggingface")
            due = {"validation_due": True} if self.validation_is_due else {}
            write_state(folder, {**state, **self.belongings, **due})
        except BaseException:
            # The folder is to be removed, so nobody may write into it any more.
            for written in working:
                _wait_quietly(written)
            raise
        return working

    def end_step(self) -> None:
        """What was saved gets its name, now that the step's metrics are on the disk.

        Raises:
            StopRun: the run is to stop here.
            CheckpointError: see `CheckpointManager.settle`.
        """
        before = self.manager.saved_step
        if self.manager.pending is not None:
            # A checkpoint is behind nothing that a run which goes on from it would lack.
            self.trainer.run_log.flush()
        self.manager.settle(wait=self.trainer.is_last_step)
        if self.manager.saved_step != before:
            self.stop.saved(self.manager.saved_in)
        if self.trainer.is_last_step and not self.validation_is_due:
            # Who asks now gets what he would get without asking.
            return
        self.stop.end_step()

    # ------------------------------------------------------------------------------------------- validation

    @contextmanager
    def leaves_validation(self) -> Iterator[None]:
        """Where the run is asked to stop in the block, the step is saved without its validation, which is made up for later."""
        timing, self.validation_is_due = self.trainer.timing_raw, True
        try:
            yield
        except StopRun:
            self.trainer.timing_raw = timing
            return
        self.validation_is_due = False
        self._check_best()

    def end_first_validation(self) -> None:
        """Takes note of a validation before the first step, which may be the one that an earlier run has left."""
        self._check_best()
        if self.validation_is_due:
            self.validation_is_due = False
            self.manager.note_metrics(self.trainer.global_steps, self.trainer.metrics)

    def _check_best(self) -> None:
        wanted, metrics = self.trainer.config.trainer.keep_best, self.trainer.metrics
        if wanted is None or wanted in metrics or self.trainer.config.trainer.val_only:
            return
        known = ", ".join(sorted(name for name in metrics if name.startswith(("val-core/", "val/"))))
        message = f"trainer.keep_best={wanted}: the validation has no such metric. It has {known or 'none'}."
        if self.trainer.global_steps == 0:
            raise ConfigError(message)
        logger.warning("%s", message)

    # ------------------------------------------------------------------------------------------------- stop

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Saves and ends where the run in the block is asked to stop (`burnish.trainer.stopping`)."""
        with self.stop.signals():
            try:
                yield
                self.manager.finish()
            except StopRun:
                self._end_early()
            except Exception as error:
                self._finish_after(error)
                raise

    def _finish_after(self, error: Exception) -> None:
        """What is being written or copied gets to its end; what ended the run has nothing to do with it.

        Workers in processes of their own may be what failed: those are not waited for.
        """
        in_process = self.trainer.config.trainer.controller == "local"
        with suppress(BurnishError):
            if in_process or not isinstance(error, WorkerError):
                self.manager.settle(wait=True)
        if self.manager.uploads is not None:
            self.manager.uploads.finish()

    def how_it_ended(self) -> tuple[int, str]:
        """The exit status of a run whose `fit` has returned, and how it ended, in a sentence."""
        if self.stopped is None:
            return 0, f"Finished after step {self.trainer.global_steps}."
        return self.stopped.status, self.ending

    def _end_early(self) -> None:
        trainer, stop = self.trainer, self.stop.asked
        assert stop is not None
        self.stopped = stop
        given_up = "" if trainer.is_logged else f" in step {trainer.global_steps} (stage: {trainer.current_stage})"
        # The run that goes on begins it again.
        trainer.is_logged = True
        is_time = stop.status == OUT_OF_TIME
        self.tell("end" if is_time else "signal", f"Asked to stop by {stop.by}{given_up}.", step=trainer.global_steps)
        try:
            saved = self._save_boundary()
        except CheckpointError as error:
            saved = f"It could not be saved: {str(error).rstrip('.')}"
        by = f"since its time was over ({stop.by})" if is_time else f"by {stop.by}"
        after = f" after step {trainer.global_steps}" if trainer.global_steps else " before the end of the first step"
        self.ending = f"Stopped {by}{given_up or after}. {saved}."

    def _save_boundary(self) -> str:
        """Saves the newest state, if it is not; returns what there is now, as a sentence without its full stop."""
        trainer = self.trainer
        self.manager.settle(wait=True)
        if self._boundary is not None:
            trainer.global_steps = self._boundary[0]
            if trainer.config.trainer.save_freq > 0 and self.manager.saved_step != trainer.global_steps:
                self.save()
        self.manager.finish()
        if trainer.config.trainer.save_freq <= 0:
            return f"Nothing is saved (trainer.save_freq={trainer.config.trainer.save_freq})"
        saved = self.manager.saved_step
        return "No step was finished, so nothing is saved" if saved is None else f"Step {saved} is saved"


def _is_written(group: Any, wait: bool) -> bool:
    return all(checked(group.checkpoint_written(wait=wait)))


def _wait_quietly(written: Written) -> None:
    try:
        written(True)
    except CheckpointError as error:
        logger.warning("%s", error)
