"""`trainer`, `ray_kwargs` and the root of the tree."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.actor_rollout_ref import ActorRolloutRefConfig
from burnish.config.algorithm import AlgoConfig
from burnish.config.critic import FSDPCriticConfig
from burnish.config.data import DataConfig
from burnish.config.names import IMPOSSIBLE_FREQUENCIES, LOGGERS, PLANNED_LOGGERS
from burnish.config.profiler import GlobalProfilerConfig
from burnish.config.reward import RewardConfig
from burnish.config.section import Section, key, not_a_key, section


@dataclass(kw_only=True, slots=True)
class TrainerConfig(Section):
    """The run: how long, where, what it writes."""

    project_name: str = key("burnish")
    """Groups runs in loggers and folders."""
    experiment_name: str = key("gsm8k")
    """Names the run."""
    default_local_dir: str = key("checkpoints/${trainer.project_name}/${trainer.experiment_name}", is_path=True)
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
    stage_timeout: float | None = key(1800.0, gt=0)
    """Seconds in which a stage has to get further (a micro-batch, a round of decoding, a scored response, a file); otherwise it
    is an error that names the silent workers and where they stand. A third of it brings a warning. null: wait for ever."""
    max_restarts: int = key(0, ge=0)
    """How often workers that died, hung or failed may be started again, from the last checkpoint. Not when training itself went
    wrong (NaN, a full disk, a configuration), and not when the same fails at the same step twice."""
    max_skipped_updates: int = key(3, ge=0)
    """Steps in a row in which every update may be skipped for non-finite gradients; one more ends the run."""
    logger: list[str] = key(["console", "file"], choices=LOGGERS, planned=PLANNED_LOGGERS, plug_in=True)
    """Where metrics go beside `file`, which is metrics.jsonl in the run's folder and always written."""
    console: str = key("auto", choices=("auto", "live", "plain", "off"))
    """How the console shows the run: a view that is drawn anew (`live`), a line a step (`plain`), or not at all (`off`). auto:
    as `logger` names the console, live on a terminal, plain in files and where CI, NO_COLOR or TERM=dumb is set."""
    log_val_generations: int = key(0, ge=0)
    """Validation samples that are shown each time, on the console and in the tables of loggers that have any."""
    rollout_data_dir: str | None = key(None, is_path=True)
    """Folder for every training response: two files a step, `N.jsonl` to read and `N.tokens.parquet` with the log-probs and the
    advantage of every token. `replay_rollouts` trains from it."""
    sample_rollouts: int = key(8, ge=0)
    """Training responses of each step that are kept to look at, in `rollouts/` of the run's folder, where `rollout_data_dir` is
    null; whole groups first. 0: none."""
    validation_data_dir: str | None = key(None, is_path=True)
    """Folder for every validation response, one JSON-lines file a validation."""
    replay_rollouts: str | None = key(None, is_path=True)
    """A `rollout_data_dir` of another run, whose responses are trained on instead of sampling any: for the same prompts, steps
    and tokenizer."""
    replay_rewards: str = key("stored", choices=("stored", "compute"))
    """Of replayed responses. stored: the scores that the other run gave; compute: the reward function scores them again."""
    val_before_train: bool = key(True)
    """Validate before the first step."""
    val_only: bool = key(False)
    """Validate and stop."""
    test_freq: int = key(-1, ge=-1, impossible=IMPOSSIBLE_FREQUENCIES)
    """Steps between validations, the last step has one too; -1 or 0: none but the one of `val_before_train`."""
    save_freq: int = key(-1, ge=-1, impossible=IMPOSSIBLE_FREQUENCIES)
    """Steps between checkpoints, the last step has one too, and a run that is stopped; -1 or 0: none."""
    on_save_error: str = key("warn", choices=("warn", "raise"))
    """When the disk does not take a checkpoint. warn: train on and try again (the last step's save still has to succeed);
    raise: end the run."""
    keep_best: str | None = key(None)
    """Metric of the validation, as `val-core/gsm8k/acc/mean@1`, whose best checkpoint is never removed; a step that is better is
    saved whatever `save_freq` says."""
    keep_best_mode: str = key("max", choices=("max", "min"))
    """Whether much or little of `keep_best` is good."""
    resume_mode: str = key("auto", choices=("auto", "disable", "resume_path", "must"))
    """auto: go on from the newest checkpoint if there is one; must: there has to be one; resume_path: from
    `resume_from_path`."""
    resume_from_path: str | None = key(None, is_path=True)
    """Checkpoint folder (global_step_N) of resume_mode=resume_path."""
    max_actor_ckpt_to_keep: int | None = key(None, ge=0)
    """Newest checkpoints that are kept, each with the policy and the critic; null or 0: all."""
    max_critic_ckpt_to_keep: int | None = key(None, ge=0)
    """Newest checkpoints that keep their critic; older ones have the policy only, and are not resumed from. null or 0: all."""
    default_hdfs_dir: str | None = key(None, is_path=True)
    """Where each checkpoint is also copied to, in the background: any URL that fsspec knows (s3://, gs://, hdfs://). A run that
    finds none in `default_local_dir` resumes from there."""
    del_local_ckpt_after_load: bool = key(False)
    """Delete the local checkpoint that a run has resumed from, where `default_hdfs_dir` has it."""
    max_wall_time: float | None = key(None, gt=0)
    """Seconds that the run may take; it saves and ends before, with exit status 75. null: as long as it takes."""
    esi_redundant_time: float = key(0, ge=0)
    """Seconds to be ready before the machine is taken away, beyond the longest step and save, where the environment says when
    that is (docs/checkpoints.md)."""


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
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    """Recording steps, for looking at them afterwards."""
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    """Ray."""
    set_keys: dict[str, str] = not_a_key(dict)
    """Keys that the user set: their names in this tree, and what was typed."""
    origins: dict[str, Any] = not_a_key(dict)
    """Where the value of each key comes from (`burnish.config.origin`)."""
