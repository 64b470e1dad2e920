"""``python -m burnish.trainer.main_ppo key=value ...``: from a command line to a trained policy.

`run_ppo` decides where things run, `TaskRunner` builds the parts, `RayPPOTrainer.fit` trains. All checks of the configuration
and of the data come before Ray, models or devices are touched.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before the imports below, which take a while.
    from burnish.utils.interrupts import end_at_ctrl_c

    end_at_ctrl_c()

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from burnish.config import PPOTrainerConfig, batch_plan, check_hub_models, check_paths, load_config
from burnish.config.profiler_checks import check_profiled_device
from burnish.config.reward_model_checks import has_reward_pool
from burnish.config.usage import track
from burnish.trainer.callers_process import left_as_found
from burnish.trainer.cluster import (
    cluster,
    has_critic_pool,
    pool_manager,
    ray_init_kwargs,
    resolve_machine,
    worker_group_cls,
    world_size,
)
from burnish.trainer.command import run_command
from burnish.trainer.ending import something_to_lose
from burnish.trainer.run import Parts, RunSummary, live
from burnish.trainer.start_checks import (
    check_folder,
    check_loss_is_importable,
    check_nobody_runs_in,
    check_sharing,
    check_vllm,
    run_without_validation_data,
)
from burnish.utils import env
from burnish.utils.console import console
from burnish.utils.errors import CheckpointError, ConfigError, DataError, RewardError, StorageError
from burnish.utils.hub import asking_again

if TYPE_CHECKING:
    from burnish.trainer.ppo.ray_trainer import RayPPOTrainer

__all__ = ["Parts", "RunSummary", "TaskRunner", "main", "ray_init_kwargs", "resolve_machine", "run_ppo", "world_size"]

logger = logging.getLogger("burnish.trainer")


class TaskRunner:
    """Builds the parts of a run and hands them to the trainer. Subclass it to swap workers, pools or datasets."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, type] = {}
        self.mapping: dict[Any, str] = {}

    def add_actor_rollout_worker(self, config: PPOTrainerConfig) -> None:
        """Registers the policy: training and rollout in one worker."""
        from burnish.trainer.ppo.roles import Role
        from burnish.workers import ActorRolloutRefWorker

        self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
        self.mapping[Role.ActorRollout] = "global_pool"

    def add_ref_policy_worker(self, config: PPOTrainerConfig) -> None:
        """Adds the reference to the policy's worker, when a KL term reads it."""
        from burnish.trainer.ppo.roles import Role, need_reference_policy

        if need_reference_policy(config):
            self.role_worker_mapping[Role.ActorRolloutRef] = self.role_worker_mapping.pop(Role.ActorRollout)
            self.mapping[Role.ActorRolloutRef] = self.mapping.pop(Role.ActorRollout)

    def add_critic_worker(self, config: PPOTrainerConfig) -> None:
        """Registers the critic, beside the policy or in a pool of its own, when the algorithm needs one."""
        from burnish.trainer.ppo.roles import Role, need_critic
        from burnish.workers import CriticWorker

        if need_critic(config):
            self.role_worker_mapping[Role.Critic] = CriticWorker
            self.mapping[Role.Critic] = "critic_pool" if has_critic_pool(config) else "global_pool"

    def add_reward_model_worker(self, config: PPOTrainerConfig) -> None:
        """Registers the reward model, beside the policy or in a pool of its own, when there is one."""
        from burnish.trainer.ppo.roles import Role, need_reward_model
        from burnish.workers import RewardModelWorker

        if need_reward_model(config):
            self.role_worker_mapping[Role.RewardModel] = RewardModelWorker
            self.mapping[Role.RewardModel] = "reward_pool" if has_reward_pool(config) else "global_pool"

    def load_reward(self, config: PPOTrainerConfig, tokenizer: Any, function: Callable[..., Any] | None) -> Any:
        """What scores responses: the reward manager, the reward model's scores, or both."""
        from burnish.reward import load_reward_manager
        from burnish.trainer.ppo.model_rewards import ModelRewards

        model = config.reward.reward_model
        if not model.enable:
            return load_reward_manager(config.reward, tokenizer, compute_score=function)
        if function is not None and model.function_weight == 0:
            raise ConfigError(
                "A reward_fn was given beside reward.reward_model.enable=true, whose score is the score, so the function would "
                "never be called. Set reward.reward_model.function_weight=1.0 to add its score, or leave it out."
            )
        weighs = model.function_weight != 0
        manager = load_reward_manager(config.reward, tokenizer, compute_score=function) if weighs else None
        return ModelRewards(config.reward, manager)

    def init_resource_pool_mgr(self, config: PPOTrainerConfig) -> Any:
        """Which pool has how many processes on how many nodes."""
        return pool_manager(config, self.mapping)

    def trainer_class(self) -> type[RayPPOTrainer]:
        """The trainer; a subclass returns its own, with the stages that it overrides."""
        from burnish.trainer.ppo.ray_trainer import RayPPOTrainer

        return RayPPOTrainer

    def build_trainer(self, config: PPOTrainerConfig, parts: Parts) -> RayPPOTrainer:
        """Data, reward and roles -> a trainer whose workers are not started yet."""
        from burnish.data import create_rl_dataset
        from burnish.render import tokenizer_of
        from burnish.reward import check_data_sources
        from burnish.trainer.preflight import Findings, check_tokenizer

        model = config.actor_rollout_ref.model
        tokenizer = tokenizer_of(model)
        found = Findings()
        check_tokenizer(config, tokenizer, found)
        found.log(logger)
        train_dataset: Any = create_rl_dataset(config.data, tokenizer, split="train", rows=parts.train_rows)
        val_dataset: Any = create_rl_dataset(config.data, tokenizer, split="val", rows=parts.val_rows)
        reward_fn = self.load_reward(config, tokenizer, parts.reward_fn)
        for dataset in (train_dataset, val_dataset):
            if dataset is not None:
                try:
                    check_data_sources(dataset, reward_fn)
                except RewardError as error:
                    raise DataError(str(error)) from error
        if val_dataset is None:
            run_without_validation_data(config)
        self.add_actor_rollout_worker(config)
        self.add_ref_policy_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        return self.trainer_class()(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=worker_group_cls(config),
            reward_fn=reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            device_name=config.trainer.device,
            callbacks=parts.callbacks,
        )

    def check(self, trainer: RayPPOTrainer) -> None:
        """What can be known to fail before workers start: code, checkpoints and numbers of the reward function that are
        named, folders to write to.

        Raises:
            ConfigError: names the key.
        """
        from burnish.rollout import get_rollout_cls
        from burnish.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
        from burnish.trainer.ppo.reward_probe import check_reward_numbers
        from burnish.trainer.preflight import Findings, check_memory, probe_reward
        from burnish.utils.tracking import check_loggers

        config = trainer.config
        check_nobody_runs_in(config.trainer.default_local_dir)
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        check_loss_is_importable(config)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        get_rollout_cls(config.actor_rollout_ref.rollout.name)
        check_sharing(config)
        check_profiled_device(config)
        check_loggers(config.trainer.logger)
        eos, pad = trainer.tokenizer.eos_token_id, trainer.tokenizer.pad_token_id
        check_reward_numbers(
            config.algorithm,
            trainer.reward_fn,
            trainer.train_dataset,
            trainer.train_dataloader.collate_fn,
            eos=pad if eos is None else eos,
        )
        found = Findings()
        probe_reward(config, trainer.reward_fn, trainer.train_dataset, trainer.tokenizer, found, known_only=True)
        if config.trainer.device == "cuda":
            check_memory(config, batch_plan(config, world_size(config)), found)
        found.log(logger)
        try:
            trainer.checkpoints.find()
        except (CheckpointError, StorageError) as error:
            raise ConfigError(str(error)) from error
        for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
            check_folder(f"trainer.{key}", getattr(config.trainer, key))

    def run(self, config: PPOTrainerConfig, parts: Parts | None = None) -> RunSummary:
        """Builds, trains, and ends the workers whatever happens; starts again where ``trainer.max_restarts`` allows it."""
        with asking_again():
            # Before the data, whose loading may take long.
            check_hub_models(config)
            check_vllm(config)
            with left_as_found():
                return live(config, lambda config: self.built(config, parts or Parts()))

    def built(self, config: PPOTrainerConfig, parts: Parts) -> RayPPOTrainer:
        """A trainer that is checked and has no workers yet; one for each attempt at the run."""
        trainer = self.build_trainer(config, parts)
        self.check(trainer)
        return trainer


def run_ppo(
    config: PPOTrainerConfig, task_runner_class: Any = None, *, parts: Parts | None = None, quiet: bool = False
) -> RunSummary:
    """Runs one training run.

    The task runner works in this process, so that Ctrl-C, ``pdb`` and callbacks work as in any Python program. A class made
    an actor by ``ray.remote`` runs on the cluster instead, which frees the machine that submits the run.

    Args:
        config: as `burnish.config.load_config` returns it.
        task_runner_class: `TaskRunner`, a subclass, or either as a Ray actor class.
        parts: datasets, a reward function or callbacks given as Python objects.
        quiet: do not print the start-up summary.
    """
    env.calm_threads()
    check_paths(config)
    track(config)
    resolve_machine(config)
    if not quiet and config.trainer.console != "off":
        console.print(batch_plan(config, world_size(config)).render(), soft_wrap=True)
    task_runner_class = task_runner_class or TaskRunner
    if hasattr(task_runner_class, "remote"):
        if parts is not None:
            raise ConfigError("A task runner on the cluster takes no Python objects (parts): name files instead.")
        import ray

        with something_to_lose(), cluster(config):
            # Held by name: Ray ends an actor that nobody refers to, also before it has begun.
            runner = task_runner_class.remote()
            return ray.get(runner.run.remote(config))
    return task_runner_class().run(config, parts)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status, as `burnish.trainer.ending` lists them."""
    return run_command("train", module="burnish.trainer.main_ppo", argv=argv, load=load_config, run=run_ppo)


if __name__ == "__main__":
    sys.exit(main())
