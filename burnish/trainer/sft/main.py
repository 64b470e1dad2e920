"""``burnish sft key=value ...``: from conversations to a model that has learnt their answers.

Everything that can be checked comes before models, Ray or devices are touched: the configuration, the files, every row rendered,
the memory that a step takes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from burnish.config import SFTTrainerConfig, check_hub_models, check_paths, load_sft_config
from burnish.config.profiler_checks import check_profiled_device
from burnish.config.usage import track
from burnish.trainer.callers_process import left_as_found
from burnish.trainer.cluster import pool_manager, resolve_machine, worker_group_cls, world_size
from burnish.trainer.command import run_command
from burnish.trainer.run import Parts, RunSummary, live
from burnish.trainer.start_checks import (
    check_folder,
    check_model_sharing,
    check_nobody_runs_in,
    run_without_validation_data,
)
from burnish.utils import env
from burnish.utils.console import console
from burnish.utils.errors import CheckpointError, ConfigError, StorageError
from burnish.utils.hub import asking_again

logger = logging.getLogger("burnish.trainer")


class SFTTaskRunner:
    """Builds the parts of a run. Subclass it to swap the datasets, the workers or the trainer."""

    def worker_class(self) -> type:
        """The workers' class."""
        from burnish.workers.sft import SFTWorker

        return SFTWorker

    def trainer_class(self) -> type:
        """The trainer; a subclass returns its own, with the stages that it overrides."""
        from burnish.trainer.sft.trainer import SFTTrainer

        return SFTTrainer

    def resource_pools(self, config: SFTTrainerConfig) -> Any:
        """How many processes on how many nodes."""
        from burnish.trainer.sft.trainer import ROLE

        return pool_manager(config, {ROLE: "global_pool"})

    def build_trainer(self, config: SFTTrainerConfig, parts: Parts) -> Any:
        """Rows rendered, workers not started yet."""
        from burnish.render import tokenizer_of
        from burnish.trainer.sft.datasets import collate, create_sft_dataset

        model = config.model
        tokenizer = tokenizer_of(model)
        train_dataset = create_sft_dataset(config, tokenizer, split="train", rows=parts.train_rows)
        val_dataset = create_sft_dataset(config, tokenizer, split="val", rows=parts.val_rows)
        if val_dataset is None:
            run_without_validation_data(config)
        return self.trainer_class()(
            config,
            tokenizer,
            self.worker_class(),
            self.resource_pools(config),
            worker_group_cls(config),
            train_dataset,
            val_dataset,
            collate_fn=partial(collate, pad_token_id=tokenizer.pad_token_id, vocab_size=len(tokenizer)),
            callbacks=parts.callbacks,
        )

    def check(self, trainer: Any) -> None:
        """What can be known to fail before workers start: loggers, checkpoints and folders, memory.

        Raises:
            ConfigError: names the key.
        """
        from burnish.trainer.preflight import Findings
        from burnish.trainer.sft.preflight import check_sft_memory
        from burnish.utils.tracking import check_loggers

        config: SFTTrainerConfig = trainer.config
        check_nobody_runs_in(config.trainer.default_local_dir)
        check_model_sharing(config.model, config.engine.ulysses_sequence_parallel_size)
        check_profiled_device(config)
        check_loggers(config.trainer.logger)
        if config.trainer.device == "cuda":
            found = Findings()
            check_sft_memory(config, trainer.train_dataset, found)
            found.log(logger)
        try:
            trainer.checkpoints.find()
        except (CheckpointError, StorageError) as error:
            raise ConfigError(str(error)) from error
        check_folder("trainer.default_local_dir", config.trainer.default_local_dir)

    def built(self, config: SFTTrainerConfig, parts: Parts, *, quiet: bool = False) -> Any:
        """A trainer that is checked and has no workers yet; one for each attempt at the run."""
        from burnish.trainer.sft.plan import describe_run

        trainer = self.build_trainer(config, parts)
        self.check(trainer)
        if not quiet and config.trainer.console != "off":
            num_val = 0 if trainer.val_dataset is None else len(trainer.val_dataset)
            said = describe_run(config, len(trainer.train_dataset), num_val, trainer.total_training_steps)
            console.print(said, soft_wrap=True, markup=False)
        return trainer

    def run(self, config: SFTTrainerConfig, parts: Parts | None = None, *, quiet: bool = False) -> RunSummary:
        """Builds, trains, and ends the workers whatever happens; starts again where ``trainer.max_restarts`` allows it."""
        with asking_again():
            check_hub_models(config)
            with left_as_found():
                return live(config, lambda config: self.built(config, parts or Parts(), quiet=quiet))


def run_sft(
    config: SFTTrainerConfig,
    task_runner_class: type[SFTTaskRunner] | None = None,
    *,
    parts: Parts | None = None,
    quiet: bool = False,
) -> RunSummary:
    """Runs one run of supervised fine-tuning in this process, with workers where ``trainer.controller`` puts them.

    Args:
        config: as `burnish.config.load_sft_config` returns it.
        task_runner_class: `SFTTaskRunner` or a subclass.
        parts: datasets or callbacks given as Python objects.
        quiet: do not print the start-up summary.
    """
    env.calm_threads()
    check_paths(config)
    track(config)
    resolve_machine(config)
    if not quiet and config.trainer.console != "off":
        from burnish.trainer.sft.plan import describe_step

        console.print(describe_step(config, world_size(config)), soft_wrap=True, markup=False)
    return (task_runner_class or SFTTaskRunner)().run(config, parts, quiet=quiet)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status, as `burnish.trainer.ending` lists them."""
    return run_command("sft", module="burnish.trainer.sft.main", argv=argv, load=load_sft_config, run=run_sft)
