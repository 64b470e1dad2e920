"""The loop of supervised fine-tuning. A step is one optimizer step on `data.train_batch_size` conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.config import SFTTrainerConfig
from burnish.data.loader import create_dataloader
from burnish.protocol import DataProto
from burnish.single_controller import RayClassWithInitArgs, WorkerGroup, create_colocated_worker_cls
from burnish.trainer.cluster_nodes import refuse_unfit_nodes
from burnish.trainer.loop import TrainingLoop
from burnish.trainer.ppo.bottleneck import bottleneck_metrics
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.trainer.ppo.pace import compute_throughout_metrics
from burnish.trainer.ppo.spawn import stack_folder
from burnish.trainer.ppo.stages import StepReport, stage
from burnish.trainer.ppo.updates import SkippedUpdates, merge_ranks
from burnish.trainer.sft.validation import run_validation

ROLE = "actor"
"""Of the one model, as its part of a checkpoint is called: what reads checkpoints knows it by this name."""


class SFTTrainer(TrainingLoop):
    """Teaches a model the marked tokens of conversations.

    Args:
        config: the whole configuration.
        tokenizer: the model's.
        worker_cls: class of the workers.
        resource_pool_manager: which processes and devices the model gets.
        worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray.
        train_dataset, val_dataset: rows with ``input_ids`` and ``loss_mask``; see `burnish.data.sft_dataset`.
        collate_fn: rows -> batch.
        callbacks: called with a `StepReport` after every step.

    Raises:
        DataError: the rows cannot fill one batch.
    """

    config: SFTTrainerConfig

    def __init__(
        self,
        config: SFTTrainerConfig,
        tokenizer: Any,
        worker_cls: type,
        resource_pool_manager: Any,
        worker_group_cls: Callable[..., WorkerGroup],
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        collate_fn: Callable[..., DataProto],
        callbacks: tuple[Callable[[StepReport], None], ...] = (),
    ) -> None:
        self.worker_cls = worker_cls
        self.worker_group_cls = worker_group_cls
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.total_tokens = 0
        data = config.data
        common: dict[str, Any] = {"seed": data.seed, "num_workers": data.num_workers, "collate_fn": collate_fn}
        train = create_dataloader(train_dataset, data.train_batch_size, shuffle=data.shuffle, drop_last=True, **common)
        validation = None
        if val_dataset is not None:
            size = data.val_batch_size or data.train_batch_size
            validation = create_dataloader(val_dataset, size, shuffle=False, drop_last=False, **common)
        super().__init__(config, tokenizer, resource_pool_manager, train, validation, callbacks)
        self.skipped_updates = SkippedUpdates(
            config.trainer.max_skipped_updates,
            self.checkpoints.root,
            why_empty="no row had a token that is learnt",
            advice="and the rows, or lower the learning rate (optim.lr)",
        )

    # ------------------------------------------------------------------------------------------------ start

    def init_workers(self) -> None:
        """Starts the worker processes and loads the model."""
        self.run_log.show(lambda: (self.global_steps, self.current_stage))
        trainer = self.config.trainer
        self.resource_pool_manager.create_resource_pool()
        refuse_unfit_nodes(self.config, self.resource_pool_manager)
        with_args = RayClassWithInitArgs(
            self.worker_cls,
            config=self.config,
            device=trainer.device,
            total_training_steps=self.total_training_steps,
        )
        group: Any = self.worker_group_cls(
            resource_pool=self.resource_pool_manager.get_resource_pool(ROLE),
            ray_cls_with_init=create_colocated_worker_cls({ROLE: with_args}),
            name_prefix=ROLE,
            stage_timeout=trainer.stage_timeout,
            stack_folder=str(stack_folder(self.config)),
            collective_timeout=self.config.nccl_timeout,
        )
        if trainer.controller != "local":
            # Dropout draws from them; the driver's are seeded as the run begins.
            group.execute_all_sync("seed_generators", trainer.seed)
        self.worker_groups = group.spawn({ROLE})
        self.actor_rollout_wg = self.worker_groups[ROLE]
        self.actor_rollout_wg.init_model()

    # -------------------------------------------------------------------------------------------------- fit

    def fit(self) -> None:
        """Trains until ``trainer.total_training_steps``, from the newest checkpoint if there is one.

        Raises:
            TrainingError: no update in more than ``trainer.max_skipped_updates`` steps in a row.
            WorkerError: a worker failed or died.
        """
        with self.checkpoints.stoppable():
            self._start_run()
            for rows in self._batches():
                batch = self.learnt_rows(rows)
                with self._step():
                    self._train(batch)
                self._end_updates(batch)
                self._validate()
                self._save_checkpoint()
                self._log(batch)
                self.checkpoints.end_step()
            self._gather_config_reads()

    @staticmethod
    def learnt_rows(rows: DataProto) -> DataProto:
        """The collated rows as the engine takes them: with labels where a token is learnt.

        A label costs a product with the whole vocabulary, so the tokens of users and tools have none.
        """
        batch = rows.select()
        batch.tensors["response_mask"] = batch.tensors["loss_mask"].bool()
        return batch

    # ----------------------------------------------------------------------------------------------- stages

    @stage("train")
    def _train(self, batch: DataProto) -> None:
        """One optimizer step on all rows of the batch."""
        planned = plan_mini_batches(
            batch,
            num_prompts=len(batch),
            dp_size=self.actor_rollout_wg.dp_size(ROLE),
            balance=self.config.trainer.balance_batch,
        )
        planned.meta_info |= {"global_steps": self.global_steps, "max_response_length": 1}
        seqlen = planned.meta_info.pop("seqlen_metrics")
        metrics = merge_ranks(self.actor_rollout_wg.train_batch(planned))
        self.metrics |= seqlen | metrics
        num_updates = len(planned.meta_info["mini_batches"]) - int(metrics["train/empty_updates"])
        self.skipped_updates.watch("train", metrics, num_updates, self.global_steps, batch)

    def validation_metrics(self) -> dict[str, float]:
        """The loss of the validation."""
        return run_validation(self)

    # ------------------------------------------------------------------------------------------ bookkeeping

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of this trainer beside its place in the data."""
        return {"total_tokens": self.total_tokens}

    def restore_own_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `own_state` gave."""
        self.total_tokens = state["total_tokens"]

    def push_weights(self) -> None:
        """Nobody else reads the weights."""

    def _end_updates(self, batch: DataProto) -> None:
        """From here on the step's result can be saved, and the run be left."""
        self.total_tokens += int(batch.tensors["attention_mask"].count_nonzero())
        self.prompts.end_step(batch)
        self.checkpoints.take_state()

    def _log(self, batch: DataProto) -> None:
        """All metrics of the step, to every logger and callback."""
        tensors = batch.tensors
        n_gpus = self.resource_pool_manager.get_n_gpus()
        self.metrics |= {
            "train/num_tokens": float(tensors["attention_mask"].count_nonzero()),
            "train/num_learnt_tokens": float(tensors["loss_mask"].count_nonzero()),
            "train/total_tokens": float(self.total_tokens),
            **{f"timing_s/{name}": seconds for name, seconds in self.timing_raw.items()},
            **compute_throughout_metrics(batch, self.timing_raw, n_gpus),
            "training/global_step": float(self.global_steps),
            "training/epoch": float(self.prompts.epoch),
        }
        per_token = self.timing_raw["train"] * 1000 / self.metrics["train/num_tokens"]
        self.metrics["timing_per_token_ms/train"] = per_token
        self.metrics |= bottleneck_metrics(self.metrics)
        self.is_logged = True
        self.run_log.step(self.metrics, self.global_steps)
