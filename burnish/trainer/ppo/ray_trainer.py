"""The trainer: one process that holds the algorithm and calls groups of workers for everything heavy.

A step is a chain of stages. Each takes a `DataProto`, adds the keys that the table at the top of `burnish/protocol.py` lists for
it, and hands it on; a variant of the algorithm overrides one stage and leaves `fit` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from burnish.config import PPOTrainerConfig, to_dict, to_yaml
from burnish.config.usage import mark_read
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.kl import apply_kl_penalty, get_kl_controller
from burnish.protocol import DataProto, object_array
from burnish.reward import RewardManager
from burnish.single_controller import WorkerGroup
from burnish.trainer.ppo.checkpoint import CheckpointManager
from burnish.trainer.ppo.dataloaders import create_dataloaders
from burnish.trainer.ppo.generations import dump_generations, sample_of, show_generations
from burnish.trainer.ppo.metrics import (
    compute_data_metrics,
    compute_rollout_difference,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from burnish.trainer.ppo.roles import Role, need_critic, need_reference_policy
from burnish.trainer.ppo.scoring import concat_scored, score_batch
from burnish.trainer.ppo.spawn import spawn_workers
from burnish.trainer.ppo.stages import FORWARD_KEYS, PROMPT_TENSORS, StepReport, stage
from burnish.trainer.ppo.updates import SkippedUpdates, update_in_passes
from burnish.trainer.ppo.validation import validation_metrics
from burnish.utils.errors import ConfigError, TrainingError
from burnish.utils.timing import marked_timer
from burnish.utils.tracking import Tracking

logger = logging.getLogger("burnish.trainer")


class RayPPOTrainer:
    """Trains a policy by PPO, GRPO or one of their family.

    Args:
        config: the whole configuration.
        tokenizer: the policy's tokenizer.
        role_worker_mapping: which class of worker plays which role.
        resource_pool_manager: which processes and devices each role gets.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray.
        processor: of multimodal models; must be None so far.
        reward_fn, val_reward_fn: score responses in training and in validation.
        train_dataset, val_dataset: prompts.
        collate_fn: rows -> batch.
        train_sampler: order of the training rows; default: shuffled by ``data.seed`` and epoch.
        device_name: "cpu" or "cuda".
        callbacks: called with a `StepReport` after every step.

    Raises:
        ConfigError: the data cannot fill one batch, or a part that the algorithm needs is missing.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, type],
        resource_pool_manager: Any,
        ray_worker_group_cls: Callable[..., WorkerGroup] | None = None,
        processor: Any = None,
        reward_fn: RewardManager | None = None,
        val_reward_fn: RewardManager | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        callbacks: tuple[Callable[[StepReport], None], ...] = (),
    ) -> None:
        if processor is not None:
            raise ConfigError("A processor was given: multimodal models are not supported yet. Pass processor=None.")
        if reward_fn is None or train_dataset is None:
            raise ConfigError("RayPPOTrainer needs a reward_fn and a train_dataset.")
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = dict(role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.device_name = device_name or "cpu"
        self.callbacks = callbacks
        self.use_critic = need_critic(config)
        self.use_reference_policy = need_reference_policy(config)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_steps = 0
        self.epoch = 0
        self.current_stage = "start"
        self.metrics: dict[str, float] = {}
        self.timing_raw: dict[str, float] = {}
        self.skipped_updates = SkippedUpdates(config.trainer.max_skipped_updates)
        # Any: a worker's methods become the group's when it is made.
        self.worker_groups: dict[Role, Any] = {}
        self.actor_rollout_wg: Any = None
        self.critic_wg: Any = None
        self.train_dataloader, self.val_dataloader = create_dataloaders(
            config.data,
            train_dataset,
            val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
            pad_token_id=self._pad_token_id,
        )
        epochs = config.trainer.total_epochs
        self.total_training_steps = config.trainer.total_training_steps or len(self.train_dataloader) * epochs
        self.checkpoints = CheckpointManager(config.trainer)
        self.logger: Tracking | None = None

    # ------------------------------------------------------------------------------------------------ start

    @property
    def _pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id

    def init_workers(self) -> None:
        """Starts the worker processes and loads the models."""
        self.worker_groups = spawn_workers(
            self.config,
            self.role_worker_mapping,
            self.resource_pool_manager,
            self.ray_worker_group_cls,
            device=self.device_name,
            total_training_steps=self.total_training_steps,
            pad_token_id=self._pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        actor_role = Role.ActorRolloutRef if Role.ActorRolloutRef in self.worker_groups else Role.ActorRollout
        self.actor_rollout_wg = self.worker_groups[actor_role]
        self.critic_wg = self.worker_groups.get(Role.Critic)
        for worker_group in self.worker_groups.values():
            worker_group.init_model()

    def shutdown(self) -> None:
        """Ends the worker processes and closes the logs; safe to call twice."""
        for worker_group in self.worker_groups.values():
            worker_group.shutdown()
        self.worker_groups = {}
        self.resource_pool_manager.shutdown()
        if self.logger is not None:
            self.logger.finish()
            self.logger = None

    # -------------------------------------------------------------------------------------------------- fit

    def fit(self) -> None:
        """Trains until ``trainer.total_training_steps``, from the newest checkpoint if there is one.

        Raises:
            TrainingError: updates were skipped more than ``trainer.max_skipped_updates`` times in a row.
            WorkerError: a worker failed or died.
        """
        self._start_run()
        for batch_dict in self._batches():
            with self._step():
                batch = self._collect(batch_dict)
                batch = self._compute_old_log_prob(batch)
                batch = self._compute_ref_log_prob(batch)
                batch = self._compute_values(batch)
                batch = self._compute_advantage(batch)
                self._update_critic(batch)
                self._update_actor(batch)
                self._update_weights()
            self._validate()
            self._save_checkpoint()
            self._log(batch)
        self._gather_config_reads()

    def _gather_config_reads(self) -> None:
        """Keys that workers in other processes have read, for the list of keys that nobody did."""
        for worker_group in self.worker_groups.values():
            mark_read(worker_group.config_reads())

    def _start_run(self) -> None:
        """Resumes, opens the logs, and validates before training if asked to."""
        trainer = self.config.trainer
        self._load_checkpoint()
        self.logger = Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            run_dir=trainer.default_local_dir,
            config=to_dict(self.config),
            resumed_step=self.global_steps,
        )
        (self.checkpoints.root / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
        if (trainer.val_before_train or trainer.val_only) and self.val_dataloader is not None:
            self._run_validation()
            self.logger.log(self.metrics, step=self.global_steps)
            self._call_back({})

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Batches of prompts, epoch after epoch, one a step, until the last step."""
        if self.config.trainer.val_only:
            return
        if self.is_last_step:
            logger.warning(
                "Nothing to train: the checkpoint is of step %d, and the run ends at step %d (trainer.total_training_steps).",
                self.global_steps,
                self.total_training_steps,
            )
        empty_epochs = 0
        while not self.is_last_step:
            before = self.global_steps
            for batch_dict in self.train_dataloader:
                self.global_steps += 1
                yield batch_dict
                if self.is_last_step:
                    return
            # What is left of the epoch of a checkpoint may be nothing; a sampler that never gives a row would go on for ever.
            empty_epochs = empty_epochs + 1 if self.global_steps == before else 0
            if empty_epochs > 1:
                raise TrainingError(f"Epoch {self.epoch}: the data loader gave no batch, and none in the epoch before.")
            self.epoch += 1

    @property
    def is_last_step(self) -> bool:
        """Whether the current step ends the run."""
        return self.global_steps >= self.total_training_steps

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.metrics, self.timing_raw = {}, {}
        with marked_timer("step", self.timing_raw):
            yield

    # ----------------------------------------------------------------------------------------------- stages

    def _collect(self, batch_dict: dict[str, Any]) -> DataProto:
        """Prompts -> scored responses. Dynamic sampling repeats this; asynchronous schedules run it ahead."""
        batch = self._get_gen_batch(batch_dict)
        batch = self._generate(batch)
        return self._compute_reward(batch)

    def _get_gen_batch(
        self, batch_dict: dict[str, Any], *, n: int | None = None, uid_prefix: str | None = None
    ) -> DataProto:
        """A batch of the data loader as `DataProto`, each prompt ``n`` times.

        The ``uid`` of a group is its epoch and row, not a random number: the random stream of a response follows from it.
        """
        batch = DataProto.from_single_dict(batch_dict, meta_info={"pad_token_id": self._pad_token_id})
        prefix = f"epoch{self.epoch}" if uid_prefix is None else uid_prefix
        n = self.config.actor_rollout_ref.rollout.n if n is None else n
        batch.non_tensor_batch["uid"] = object_array([f"{prefix}-{row}" for row in batch.non_tensor_batch["uid"]])
        num_prompts = len(batch)
        batch = batch.repeat(n, interleave=True)
        batch.non_tensor_batch["sample_index"] = object_array(list(range(n)) * num_prompts)
        return batch

    @stage("gen")
    def _generate(self, batch: DataProto) -> DataProto:
        """Responses with their log-probs; the prompts' tensors come back inside them."""
        return self._sample(batch, validate=False)

    def _sample(self, batch: DataProto, *, validate: bool) -> DataProto:
        prompts = batch.pop(batch_keys=PROMPT_TENSORS)
        prompts.non_tensor_batch = {key: batch.non_tensor_batch[key] for key in ("uid", "sample_index")}
        prompts.meta_info = {"pad_token_id": self._pad_token_id, "validate": validate}
        generated = self.actor_rollout_wg.generate_sequences(prompts)
        return batch.union(generated)

    @stage("reward")
    def _compute_reward(self, batch: DataProto) -> DataProto:
        """A score per response, on its last token."""
        batch, metrics = score_batch(self.reward_fn, batch)
        self.metrics |= metrics
        return batch

    @stage("old_log_prob", when="needs_old_log_probs")
    def _compute_old_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the policy before the update.

        With one update per batch they are the update's own, detached: the pass is left out, and the update measures the
        difference to the rollout's.
        """
        batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch.select(**FORWARD_KEYS)))
        self.metrics |= compute_rollout_difference(batch)
        return batch

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the policy moves between sampling and an update, or something before the updates reads its log-probs."""
        actor = self.config.actor_rollout_ref.actor
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.config.data.train_batch_size
        return not one_update or self.config.algorithm.use_kl_in_reward

    @stage("ref", when="use_reference_policy")
    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the frozen reference, when a KL term reads them."""
        return batch.union(self.actor_rollout_wg.compute_ref_log_prob(batch.select(**FORWARD_KEYS)))

    @stage("values", when="use_critic")
    def _compute_values(self, batch: DataProto) -> DataProto:
        """The critic's value of the state before each response token."""
        return batch.union(self.critic_wg.compute_values(batch.select(**FORWARD_KEYS)))

    @stage("adv")
    def _compute_advantage(self, batch: DataProto) -> DataProto:
        """Rewards (scores, less KL if asked for) -> advantages and returns."""
        algorithm = self.config.algorithm
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
            self.metrics |= kl_metrics
        else:
            batch.tensors["token_level_rewards"] = batch.tensors["token_level_scores"]
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )

    @stage("update_critic", when="use_critic")
    def _update_critic(self, batch: DataProto) -> None:
        """Fits the values to the returns."""
        self._update("critic", self.critic_wg, self.critic_wg.update_critic, batch, self.config.critic)

    @stage("update_actor", when="critic_is_warm")
    def _update_actor(self, batch: DataProto) -> None:
        """Improves the policy."""
        actor = self.config.actor_rollout_ref.actor
        self._update("actor", self.actor_rollout_wg, self.actor_rollout_wg.update_actor, batch, actor)

    @property
    def critic_is_warm(self) -> bool:
        """The first ``trainer.critic_warmup`` steps train the critic alone."""
        return self.global_steps > self.config.trainer.critic_warmup

    def _update(self, name: str, group: WorkerGroup, update: Callable, batch: DataProto, config: Any) -> None:
        metrics, num_updates = update_in_passes(
            update,
            batch,
            config,
            dp_size=group.world_size,
            balance=self.config.trainer.balance_batch,
            step=self.global_steps,
            max_response_length=self.config.data.max_response_length,
        )
        self.metrics |= metrics
        self.skipped_updates.watch(name, metrics, num_updates, self.global_steps)

    @stage("update_weights")
    def _update_weights(self) -> None:
        """The rollout gets the new weights (nothing to do where it decodes on the actor's own)."""
        self.actor_rollout_wg.update_weights(self.global_steps)

    # ------------------------------------------------------------------------------------------ bookkeeping

    def _is_due(self, freq: int) -> bool:
        return freq > 0 and (self.global_steps % freq == 0 or self.is_last_step)

    def _validate(self) -> None:
        """Validation metrics, every ``trainer.test_freq`` steps and at the end."""
        if self.val_dataloader is not None and self._is_due(self.config.trainer.test_freq):
            self._run_validation()

    @stage("testing")
    def _run_validation(self) -> None:
        val_kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        scored = []
        for batch_dict in self.val_dataloader:  # type: ignore[union-attr]
            batch = self._get_gen_batch(batch_dict, n=val_kwargs.n, uid_prefix="val")
            batch = self._sample(batch, validate=True)
            scored.append(score_batch(self.val_reward_fn, batch)[0])
        batch = concat_scored(scored)
        self.metrics |= validation_metrics(batch)
        num_shown = self.config.trainer.log_val_generations
        if num_shown > 0:
            show_generations(batch, self.tokenizer, num_shown, self.global_steps)
        if self.config.trainer.validation_data_dir:
            dump_generations(batch, self.tokenizer, self.config.trainer.validation_data_dir, self.global_steps)

    def _save_checkpoint(self) -> None:
        """A checkpoint every ``trainer.save_freq`` steps and at the end."""
        if self._is_due(self.config.trainer.save_freq):
            self._write_checkpoint()

    @stage("save_checkpoint")
    def _write_checkpoint(self) -> None:
        with self.checkpoints.writing(self.global_steps) as folder:
            self.actor_rollout_wg.save_checkpoint(f"{folder}/actor")
            # With its tokenizer the folder is a model like any other.
            self.tokenizer.save_pretrained(f"{folder}/actor")
            if self.use_critic:
                self.critic_wg.save_checkpoint(f"{folder}/critic")
            self.checkpoints.write_state(
                folder,
                {
                    "global_steps": self.global_steps,
                    "epoch": self.epoch,
                    "dataloader": self.train_dataloader.state_dict(),
                    "kl_coef": self.kl_ctrl_in_reward.value,
                },
            )

    def _load_checkpoint(self) -> None:
        folder = self.checkpoints.find()
        if folder is None:
            return
        state = self.checkpoints.read_state(folder)
        self.global_steps, self.epoch = state["global_steps"], state["epoch"]
        self.train_dataloader.load_state_dict(state["dataloader"])
        self.kl_ctrl_in_reward.value = state["kl_coef"]
        self.actor_rollout_wg.load_checkpoint(f"{folder}/actor")
        if self.use_critic:
            self.critic_wg.load_checkpoint(f"{folder}/critic")
        self._update_weights()

    def _log(self, batch: DataProto) -> None:
        """All metrics of the step, to every logger and callback."""
        self.metrics |= compute_data_metrics(
            batch, self.use_critic, self.config.data.max_prompt_length, self.config.data.max_response_length
        )
        self.metrics |= compute_timing_metrics(batch, self.timing_raw)
        self.metrics |= compute_throughout_metrics(
            batch, self.timing_raw, n_gpus=self.resource_pool_manager.get_n_gpus()
        )
        self.metrics |= {"training/global_step": self.global_steps, "training/epoch": self.epoch}
        if self.logger is not None:
            self.logger.log(self.metrics, step=self.global_steps)
        if self.config.trainer.rollout_data_dir:
            dump_generations(batch, self.tokenizer, self.config.trainer.rollout_data_dir, self.global_steps)
        if self.callbacks:
            self._call_back(sample_of(batch, self.tokenizer))

    def _call_back(self, sample: dict[str, Any]) -> None:
        report = StepReport(
            step=self.global_steps, total_steps=self.total_training_steps, metrics=dict(self.metrics), sample=sample
        )
        for callback in self.callbacks:
            callback(report)
