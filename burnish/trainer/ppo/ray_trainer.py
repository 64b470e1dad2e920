"""The trainer: one process that holds the algorithm and calls groups of workers for everything heavy.

A step is a chain of stages. Each takes a `DataProto`, adds the keys that the table at the top of `burnish/protocol.py` lists for
it, and hands it on; a variant of the algorithm overrides one stage and leaves `fit` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.config.dump_checks import samples_responses
from burnish.core_algos.kl import get_kl_controller
from burnish.protocol import DataProto
from burnish.reward import RewardManager
from burnish.single_controller import WorkerGroup
from burnish.trainer.loop import TrainingLoop
from burnish.trainer.ppo.advantage_stage import advantages_of
from burnish.trainer.ppo.balance import on_balanced_ranks
from burnish.trainer.ppo.baselines import add_reward_baselines, one_row_per_prompt
from burnish.trainer.ppo.beside import PASSES, UNTIL_SCORES, UPDATES, Beside, are_of
from burnish.trainer.ppo.dataloaders import create_dataloaders
from burnish.trainer.ppo.dynamic_sampling import DynamicSampling
from burnish.trainer.ppo.metrics import compute_rollout_difference
from burnish.trainer.ppo.model_rewards import early_manager
from burnish.trainer.ppo.prompts import repeat_prompts, take_prompts
from burnish.trainer.ppo.replay import make_replay
from burnish.trainer.ppo.roles import (
    Role,
    need_critic,
    need_greedy_baseline,
    need_old_log_probs,
    need_reference_policy,
    need_reward_model,
)
from burnish.trainer.ppo.scoring import merge_rounds, score_batch, score_for_training
from burnish.trainer.ppo.spawn import spawn_workers
from burnish.trainer.ppo.stages import FORWARD_KEYS, StepReport, stage
from burnish.trainer.ppo.step_metrics import step_metrics
from burnish.trainer.ppo.updates import Passes, SkippedUpdates, joined, kept_on_error, resample_rows, update_in_passes
from burnish.trainer.ppo.validation import run_validation
from burnish.utils.errors import ConfigError
from burnish.utils.timing import marked_timer


class RayPPOTrainer(TrainingLoop):
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

    config: PPOTrainerConfig

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
        train, validation = create_dataloaders(
            config.data,
            train_dataset,
            val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
            pad_token_id=tokenizer.pad_token_id,
        )
        super().__init__(config, tokenizer, resource_pool_manager, train, validation, callbacks)
        self.role_worker_mapping = dict(role_worker_mapping)
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.device_name = device_name or "cpu"
        self.use_critic = need_critic(config)
        self.use_reference_policy = need_reference_policy(config)
        self.use_greedy_baseline = need_greedy_baseline(config)
        self.needs_old_log_probs = need_old_log_probs(config)
        self.use_reward_model = need_reward_model(config)
        self.early_manager = early_manager(reward_fn, config.reward) if val_reward_fn in (None, reward_fn) else None
        self.filters_groups = config.algorithm.filter_groups.enable
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        self.reward_metrics: list[dict[str, float]] = []
        self.num_gen_tokens = 0
        self.reward_model_wg: Any = None
        self.critic_is_apart = self.reward_model_is_apart = False
        self.model_scores: Beside[DataProto] | None = None
        self.critic_values: Beside[DataProto] | None = None
        self.critic_passes: Beside[Passes] | None = None
        self.sampling = DynamicSampling(
            config.algorithm.filter_groups,
            num_prompts=config.data.train_batch_size,
            batches_per_epoch=self.prompts.batches_per_epoch,
        )
        self.skipped_updates = SkippedUpdates(config.trainer.max_skipped_updates, self.checkpoints.root)
        self.replay = make_replay(config, tokenizer, self.total_training_steps)

    # ------------------------------------------------------------------------------------------------ start

    @property
    def _pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id

    def init_workers(self) -> None:
        """Starts the worker processes and loads the models."""
        self.run_log.show(lambda: (self.global_steps, self.current_stage))
        self.worker_groups = spawn_workers(
            self.config,
            self.role_worker_mapping,
            self.resource_pool_manager,
            self.ray_worker_group_cls,
            device=self.device_name,
            total_training_steps=self.total_training_steps,
            pad_token_id=self._pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            reward_manager=self.early_manager,
            samples=samples_responses(self.config, has_validation=self.val_dataloader is not None),
        )
        actor_role = Role.ActorRolloutRef if Role.ActorRolloutRef in self.worker_groups else Role.ActorRollout
        self.actor_rollout_wg = self.worker_groups[actor_role]
        self.critic_wg = self.worker_groups.get(Role.Critic)
        pool_of = self.resource_pool_manager.get_resource_pool
        self.critic_is_apart = self.use_critic and pool_of(Role.Critic) is not pool_of(actor_role)
        self.reward_model_wg = self.worker_groups.get(Role.RewardModel)
        others = [pool_of(role) for role in self.worker_groups if role is not Role.RewardModel]
        self.reward_model_is_apart = self.use_reward_model and pool_of(Role.RewardModel) not in others
        for worker_group in self.worker_groups.values():
            worker_group.init_model()

    def own_parts(self) -> tuple[Any, ...]:
        """What scores responses."""
        return self.val_reward_fn, self.reward_fn

    # -------------------------------------------------------------------------------------------------- fit

    def fit(self) -> None:
        """Trains until ``trainer.total_training_steps``, from the newest checkpoint if there is one.

        Raises:
            TrainingError: training cannot go on: no update in more than ``trainer.max_skipped_updates`` steps in a row, no
                group that varies, NaN where advantages are made.
            WorkerError: a worker failed or died.
        """
        with self.checkpoints.stoppable():
            self._start_run()
            for batch_dict in self._batches():
                with self._step():
                    batch = self._collect(batch_dict)
                    self._begin_values(batch)
                    batch = self._compute_old_log_prob(batch)
                    batch = self._compute_ref_log_prob(batch)
                    batch = self._compute_values(batch)
                    batch = self._take_late_scores(batch)
                    batch = self._compute_advantage(batch)
                    self._update_models(batch)
                    self._update_weights()
                self._end_updates(batch)
                self._validate()
                self._save_checkpoint()
                self._log(batch)
                self.checkpoints.end_step()
            self._gather_config_reads()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.reward_metrics, self.num_gen_tokens = [], 0
        self.critic_values = self.critic_passes = self.model_scores = None
        with super()._step():
            yield

    # ----------------------------------------------------------------------------------------------- stages

    def _collect(self, batch_dict: dict[str, Any]) -> DataProto:
        """Prompts -> scored responses: one round, or as many as dynamic sampling needs. Where the reward model works beside the
        passes that follow, the scores come behind these (`_take_late_scores`)."""
        self.sampling.start()
        for prompts in chain([batch_dict], self.prompts):
            batch = self._get_gen_batch(prompts)
            batch = self._generate(batch)
            if self.model_scores is None:
                batch = self._score(batch)
            self.sampling.add(self._filter_groups(batch))
            if self.sampling.is_complete:
                break
        self.metrics |= self.sampling.metrics()
        return self.sampling.take()

    def _score(self, batch: DataProto) -> DataProto:
        batch = self._compute_reward(batch)
        self.prompts.take_scores(batch)
        self.run_log.dumps.take_round(batch, self.reward_metrics[-1])
        return batch

    def _take_late_scores(self, batch: DataProto) -> DataProto:
        """The scores of responses that the reward model has read beside the passes since; else they are there already."""
        return batch if self.model_scores is None else self._score(self._score_by_model(batch))

    def _get_gen_batch(
        self, batch_dict: dict[str, Any], *, n: int | None = None, uid_prefix: str | None = None
    ) -> DataProto:
        """A batch of the data loader as `DataProto`, each prompt ``n`` times; see `repeat_prompts`."""
        return repeat_prompts(
            batch_dict,
            n=self.config.actor_rollout_ref.rollout.n if n is None else n,
            uid_prefix=uid_prefix or self.sampling.uid_prefix(self.prompts.epoch),
            pad_token_id=self._pad_token_id,
        )

    @stage("gen")
    def _generate(self, batch: DataProto) -> DataProto:
        """Responses with their log-probs, and ReMax's baselines; the prompts' tensors come back inside the responses."""
        if self.replay is not None:
            return self.replay.stand_in(self, batch)
        if self.use_greedy_baseline:
            with marked_timer("gen_max", self.timing_raw):
                greedy = one_row_per_prompt(batch, sample_index=self.config.actor_rollout_ref.rollout.n)
                greedy, _ = score_batch(self.reward_fn, self._sample(greedy, greedy=True))
                batch = add_reward_baselines(batch, greedy)
        return self._sample(batch)

    def _sample(self, batch: DataProto, *, validate: bool = False, greedy: bool = False) -> DataProto:
        self.checkpoints.stop.pass_by()
        prompts = take_prompts(batch, are_scored=self.early_manager is not None)
        prompts.meta_info = {"pad_token_id": self._pad_token_id, "validate": validate, "greedy": greedy}
        generated = self.actor_rollout_wg.generate_sequences(prompts)
        if not validate:
            self.num_gen_tokens += int(generated.tensors["response_mask"].count_nonzero())
        batch = batch.union(generated)
        if not validate and self._scores_may_be_late:
            self.model_scores = Beside(partial(self._model_scores, batch.select()), "reward-model")
            return batch
        return self._score_by_model(batch)

    @property
    def _scores_may_be_late(self) -> bool:
        """Whether the reward model, on devices of its own, may work beside the passes of policy, reference and critic: where
        there are any, and none of what comes before them reads a score."""
        has_passes = self.needs_old_log_probs or self.use_reference_policy or self.use_critic
        reads_scores = self.filters_groups or self.use_greedy_baseline
        return (
            self.reward_model_is_apart and has_passes and not reads_scores and are_of(RayPPOTrainer, self, UNTIL_SCORES)
        )

    @stage("reward_model", when="use_reward_model")
    def _score_by_model(self, batch: DataProto) -> DataProto:
        """The reward model's score of each response, for the reward manager."""
        # What comes next, a validation, has scores of its own.
        late, self.model_scores = self.model_scores, None
        return batch.union(self._model_scores(batch) if late is None else self._wait_for("reward_model", late))

    def _model_scores(self, batch: DataProto) -> DataProto:
        others = [key for key in ("uid", "raw_prompt") if key in batch.non_tensor_batch]
        rows = batch.select(batch_keys=FORWARD_KEYS["batch_keys"], non_tensor_batch_keys=others)
        return self.reward_model_wg.compute_rm_score(rows)

    @stage("reward")
    def _compute_reward(self, batch: DataProto) -> DataProto:
        """A score per response, on its last token, and with GDPO its components."""
        score = score_for_training if self.replay is None else self.replay.score
        batch, metrics = score(self.reward_fn, batch, self.config)
        self.reward_metrics.append(metrics)
        self.metrics |= merge_rounds(self.reward_metrics)
        return batch

    @stage("filter", when="filters_groups")
    def _filter_groups(self, batch: DataProto) -> DataProto:
        """The rows of the groups whose metric varies."""
        return self.sampling.filter(batch)

    def _compute_old_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the policy before the update; in bypass mode the rollout's.

        With one update per batch they are the update's own, detached: the pass is left out, and the update measures the
        difference to the rollout's.
        """
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
        return self._old_log_prob_pass(batch)

    @stage("old_log_prob", when="needs_old_log_probs")
    def _old_log_prob_pass(self, batch: DataProto) -> DataProto:
        batch = batch.union(self._forward("actor", self.actor_rollout_wg, "compute_log_prob", batch))
        self.metrics |= compute_rollout_difference(batch)
        return batch

    @stage("ref", when="use_reference_policy")
    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the frozen reference, when a KL term reads them."""
        return batch.union(self._forward("ref", self.actor_rollout_wg, "compute_ref_log_prob", batch))

    def _begin_values(self, batch: DataProto) -> None:
        """On devices of its own the critic needs not wait for the passes of the policy and the reference."""
        if self.critic_is_apart and are_of(RayPPOTrainer, self, PASSES):
            # A batch of its own, for the stages until then add to this one.
            values = partial(self._forward, "critic", self.critic_wg, "compute_values", batch.select())
            self.critic_values = Beside(values, "critic-values")

    @stage("values", when="use_critic")
    def _compute_values(self, batch: DataProto) -> DataProto:
        """The critic's value of the state before each response token."""
        if self.critic_values is None:
            return batch.union(self._forward("critic", self.critic_wg, "compute_values", batch))
        return batch.union(self._wait_for("values", self.critic_values))

    def _wait_for(self, name: str, beside: Beside) -> Any:
        """What was done beside other stages; its own seconds are ``timing_s/<name>_beside``."""
        found = beside.result()
        self.timing_raw[f"{name}_beside"] = beside.seconds
        return found

    def _forward(self, name: str, group: Any, method: str, batch: DataProto) -> DataProto:
        """What a worker group's pass without gradient gives, its rows spread over the ranks of the mesh ``name``."""
        model = self.config.critic if name == "critic" else self.config.actor_rollout_ref.actor
        return on_balanced_ranks(
            getattr(group, method),
            batch,
            group.dp_size(name),
            balance=self.config.trainer.balance_batch,
            share_prompts=model.use_prefix_grouper,
        )

    @stage("adv")
    def _compute_advantage(self, batch: DataProto) -> DataProto:
        """Rewards (scores, less KL if asked for) -> advantages and returns; corrects the rollout on the way."""
        with kept_on_error(batch, self.checkpoints.root, self.global_steps):
            batch, metrics = advantages_of(batch, self.config, self.kl_ctrl_in_reward)
        self.metrics |= metrics
        return batch

    def _update_models(self, batch: DataProto) -> None:
        """Critic, then policy; both at once where the critic has devices of its own."""
        if self.critic_is_apart and are_of(RayPPOTrainer, self, UPDATES):
            self.critic_passes = Beside(partial(self._critic_passes, batch.select()), "critic-update")
            self._update_actor(batch)
            self._update_critic(batch)
        else:
            self._update_critic(batch)
            self._update_actor(batch)

    @stage("update_critic", when="use_critic")
    def _update_critic(self, batch: DataProto) -> None:
        """Fits the values to the returns."""
        if self.critic_passes is None:
            passes = self._critic_passes(batch)
            self.metrics = joined(self.metrics, passes.metrics)
        else:
            passes = self._wait_for("update_critic", self.critic_passes)
            # As if it had been first: of what both tell, the policy's counts.
            self.metrics = joined(passes.metrics, self.metrics)
        self.skipped_updates.watch("critic", passes.metrics, passes.num_updates, self.global_steps, passes.rows)

    @stage("update_actor", when="critic_is_warm")
    def _update_actor(self, batch: DataProto) -> None:
        """Improves the policy."""
        group = self.actor_rollout_wg
        passes = self._passes("actor", group, group.update_actor, batch, self.config.actor_rollout_ref.actor)
        self.metrics = joined(self.metrics, passes.metrics)
        self.skipped_updates.watch("actor", passes.metrics, passes.num_updates, self.global_steps, passes.rows)

    @property
    def critic_is_warm(self) -> bool:
        """The first ``trainer.critic_warmup`` steps train the critic alone, where there is one."""
        return not self.use_critic or self.global_steps > self.config.trainer.critic_warmup

    def _critic_passes(self, batch: DataProto) -> Passes:
        return self._passes("critic", self.critic_wg, self.critic_wg.update_critic, batch, self.config.critic)

    def _passes(self, name: str, group: WorkerGroup, update: Callable, batch: DataProto, config: Any) -> Passes:
        rows, resampling = resample_rows(
            batch, self.config.algorithm, seed=self.config.trainer.seed, step=self.global_steps
        )
        metrics, num_updates = update_in_passes(
            update,
            rows,
            config,
            dp_size=group.dp_size(name),
            balance=self.config.trainer.balance_batch,
            step=self.global_steps,
            max_response_length=self.config.data.max_response_length,
        )
        return Passes(resampling | metrics, num_updates, rows)

    @stage("update_weights")
    def _update_weights(self) -> None:
        """The rollout gets the new weights (nothing to do where it decodes on the actor's own)."""
        self.push_weights()

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of this trainer beside its place in the data."""
        return {"kl_coef": self.kl_ctrl_in_reward.value}

    def restore_own_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `own_state` gave."""
        self.kl_ctrl_in_reward.value = state["kl_coef"]

    def push_weights(self) -> None:
        """Gives the rollout the policy's weights."""
        self.actor_rollout_wg.update_weights(self.global_steps)

    def validation_metrics(self) -> dict[str, float]:
        """What responses to the prompts of the validation score."""
        return run_validation(self)

    # ------------------------------------------------------------------------------------------ bookkeeping

    def _end_updates(self, batch: DataProto) -> None:
        """From here on the step's result can be saved, and the run be left."""
        self.prompts.end_step(batch)
        self.checkpoints.take_state()

    def _log(self, batch: DataProto) -> None:
        """All metrics of the step, to every logger and callback."""
        self.metrics, self.is_logged = step_metrics(self, batch), True
        self.run_log.step(self.metrics, self.global_steps, batch)
