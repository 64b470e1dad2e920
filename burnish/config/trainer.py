"""`trainer`, `ray_kwargs` and the root of the tree."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.actor_rollout_ref import ActorRolloutRefConfig
from burnish.config.algorithm import AlgoConfig
from burnish.config.critic import FSDPCriticConfig
from burnish.config.data import DataConfig
from burnish.config.names import LOGGERS, PLANNED_LOGGERS
from burnish.config.reward import RewardConfig
from burnish.config.section import Section, key, not_a_key, section


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Section):
    """The run: how long, where, what it writes."""

    project_name: str = key("burnish")
    """Groups runs in loggers and folders."""
    experiment_name: str = key("gsm8k")
    """Names the run."""
    default_local_dir: str = key("checkpoints/${trainer.project_name}/${trainer.experiment_name}")
    """Folder of checkpoints, metrics and the configuration of the run."""
    seed: int = key(42, ge=0, le=2**32 - 1)
    """Decides everything random: order of the data, sampling, initialisation."""
    total_epochs: int = key(30, ge=1)
    """Passes over the training data."""
    total_training_steps: int | None = key(None, ge=1)
    """Steps of the run, whatever the epochs; null: as the epochs give."""
    critic_warmup: int = key(0, ge=0)
    """Steps that train the critic only."""
    balance_batch: bool = key(True)
    """Give every worker about the same number of tokens."""
    controller: str = key("auto", choices=("auto", "local", "ray"))
    """`local` runs the one worker in the driver's process; `ray` starts actors; auto: local for one worker."""
    nnodes: int = key(1, ge=1)
    """Nodes."""
    n_gpus_per_node: int | str = key("auto", choices=("auto",), ge=1)
    """Workers per node, one for each GPU; auto: as many as there are GPUs, 1 without one."""
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """Where models run; auto: a GPU where there is one."""
    stage_timeout: float | None = key(None, gt=0)
    """Seconds after which a stage that does not end is an error naming the silent workers; null: wait for ever."""
    max_skipped_updates: int = key(3, ge=0)
    """Steps in a row in which every update may be skipped for non-finite gradients; one more ends the run."""
    logger: list[str] = key(["console", "file"], choices=LOGGERS, planned=PLANNED_LOGGERS, plug_in=True)
    """Where metrics go; `file` is metrics.jsonl in the run's folder."""
    log_val_generations: int = key(0, ge=0)
    """Validation samples that are logged each time."""
    rollout_data_dir: str | None = key(None)
    """Folder for every training response, one JSON-lines file a step."""
    validation_data_dir: str | None = key(None)
    """Folder for every validation response."""
    val_before_train: bool = key(True)
    """Validate before the first step."""
    val_only: bool = key(False)
    """Validate and stop."""
    test_freq: int = key(-1, ge=-1)
    """Steps between validations, the last step has one too; -1 or 0: none but the one of `val_before_train`."""
    save_freq: int = key(-1, ge=-1)
    """Steps between checkpoints; -1 or 0: none."""
    resume_mode: str = key("auto", choices=("auto", "disable", "resume_path", "must"))
    """auto: go on from the newest checkpoint if there is one; must: there has to be one; resume_path: from
    `resume_from_path`."""
    resume_from_path: str | None = key(None)
    """Checkpoint folder (global_step_N) of resume_mode=resume_path."""
    max_actor_ckpt_to_keep: int | None = key(None, ge=1)
    """Newest checkpoints that are kept, each with the policy and the critic; null: all."""


@dataclass(kw_only=True, slots=True)
class RayKwargsConfig(Section):
    """Ray."""

    ray_init: dict[str, Any] = key({"num_cpus": None})
    """Arguments of `ray.init` (`ray_kwargs.ray_init.num_cpus=8`)."""


@dataclass(kw_only=True, slots=True)
class PPOTrainerConfig(Section):
    """All of a run's configuration; `burnish.config.load_config` makes one."""

    algorithm: AlgoConfig = section(AlgoConfig)
    """Advantages and KL."""
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """The policy."""
    critic: FSDPCriticConfig = section(FSDPCriticConfig)
    """The value function."""
    data: DataConfig = section(DataConfig)
    """Datasets."""
    reward: RewardConfig = section(RewardConfig)
    """Rewards."""
    trainer: TrainerConfig = section(TrainerConfig)
    """The run."""
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    """Ray."""
    set_keys: dict[str, str] = not_a_key(dict)
    """Keys that the user set: their names in this tree, and what was typed."""
