"""The configuration of supervised fine-tuning: `burnish.trainer.sft`. The sections of training, model and run are those of
reinforcement learning, at other defaults."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.actor_rollout_ref import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.config.data import CustomClassConfig
from burnish.config.profiler import GlobalProfilerConfig, ProfilerConfig
from burnish.config.section import Section, key, not_a_key, section
from burnish.config.trainer import RayKwargsConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(Section):
    """The rows to learn, and how they are cut into batches."""

    train_files: list[str] = key([], is_path=True)
    """What to train on: files (parquet, jsonl, json, csv; the last three also as .gz), patterns, folders, data sets of the
    hub as `org/name:configuration:split`."""
    val_files: list[str] = key([], is_path=True)
    """What to validate on, likewise; null: no validation."""
    train_max_samples: int = key(-1, ge=-1)
    """Rows of the training data that are used; -1: all."""
    val_max_samples: int = key(-1, ge=-1)
    """Rows of the validation data that are used; -1: all."""
    messages_key: str = key("messages")
    """Column with a conversation: a list of messages, or the same as JSON."""
    prompt_key: str | None = key(None)
    """Column with the prompt of rows that have one answer: text, or messages; `extra_info.question` is the entry `question` of
    the column `extra_info`. It comes with `response_key`, and `messages_key` is not looked at then."""
    response_key: str | None = key(None)
    """Column with that answer, likewise."""
    tools_key: str = key("tools")
    """Column with the schemas of the tools that a conversation may use; rows need not have it."""
    enable_thinking_key: str = key("enable_thinking")
    """Column that says whether the chat template is asked for thinking; rows need not have it."""
    system_prompt: str | None = key(None, blank=True)
    """System message that is put before conversations that have none; null: none."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Further arguments of the chat template (`enable_thinking` and the like)."""
    train_on: str = key("all", choices=("all", "last"))
    """Which answers of a conversation are learnt: every one, or the last alone."""
    ignore_input_ids_mismatch: bool = key(False)
    """Take a conversation whose turns the chat template writes differently as it goes on (thinking that is left out later)
    turn by turn, each as generation would see it, instead of refusing it."""
    max_length: int = key(1024, ge=2)
    """Tokens of a conversation, at most."""
    truncation: str = key("error", choices=("error", "left", "right"))
    """What happens to a longer one: an error, its beginning is cut off, or its end."""
    train_batch_size: int = key(256, ge=1)
    """Conversations of one optimizer step, over all workers."""
    val_batch_size: int | None = key(None, ge=1)
    """Conversations that are validated at once, over all workers; null: `train_batch_size`. The result does not depend on
    it."""
    micro_batch_size_per_gpu: int | None = key(None, ge=1)
    """Conversations that go through the model at once, per worker; null: `use_dynamic_bsz` becomes true."""
    use_dynamic_bsz: bool = key(False)
    """Cut micro-batches by `max_token_len_per_gpu` instead of conversations. The gradient is the same however they are cut."""
    max_token_len_per_gpu: int = key(8192, ge=1)
    """Tokens that go through the model at once, per worker, where micro-batches are cut by tokens: a hard bound."""
    shuffle: bool = key(True)
    """Another order of the training rows in every epoch."""
    seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of the order."""
    num_workers: int = key(0, ge=0)
    """Processes that read rows ahead; 0: the driver itself."""
    render_workers: int = key(1, ge=1)
    """Processes that render the conversations of a large set (more than 20,000 rows)."""
    cache_dir: str | None = key(None, is_path=True)
    """Folder where rendered data sets are kept for the next run with the same files, tokenizer and keys; null: nowhere."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A dataset class of your own."""
    custom: dict[str, Any] = key({})
    """Keys of your own dataset class (`data.custom.alpha=0.3`); it reads them as `config.custom["alpha"]`."""


@dataclass(kw_only=True, slots=True)
class SFTRunConfig(TrainerConfig):
    """The run: how long, where, what it writes."""

    experiment_name: str = key("sft")
    """Names the run."""
    total_epochs: int = key(4, ge=1)
    """Passes over the training data."""
    keep_best: str | None = key(None)
    """Metric of the validation, as `val/loss`, whose best checkpoint is never removed; a step that is better is saved whatever
    `save_freq` says."""
    keep_best_mode: str = key("min", choices=("max", "min"))
    """Whether much or little of `keep_best` is good."""
    max_actor_ckpt_to_keep: int | None = key(None, ge=0)
    """Newest checkpoints that are kept; null or 0: all."""
    # What only reinforcement learning has.
    critic_warmup: int = not_a_key(lambda: 0)
    log_val_generations: int = not_a_key(lambda: 0)
    rollout_data_dir: str | None = not_a_key(lambda: None)
    sample_rollouts: int = not_a_key(lambda: 0)
    validation_data_dir: str | None = not_a_key(lambda: None)
    replay_rollouts: str | None = not_a_key(lambda: None)
    replay_rewards: str = not_a_key(lambda: "stored")
    max_critic_ckpt_to_keep: int | None = not_a_key(lambda: None)


@dataclass(kw_only=True, slots=True)
class SFTTrainerConfig(Section):
    """All of a run's configuration; `burnish.config.load_sft_config` makes one."""

    model: HFModelConfig = section(HFModelConfig)
    """The model that learns."""
    data: SFTDataConfig = section(SFTDataConfig)
    """Datasets."""
    engine: FSDPEngineConfig = section(FSDPEngineConfig)
    """Layout on the workers."""
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig, lr=1e-5)
    """Optimizer."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of checkpoints."""
    trainer: SFTRunConfig = section(SFTRunConfig)
    """The run."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Recording the model's workers."""
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    """Recording steps, to look at them afterwards."""
    nccl_timeout: int = key(600, ge=1)
    """Seconds after which a collective operation between workers that does not end is an error."""
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    """Ray."""
    set_keys: dict[str, str] = not_a_key(dict)
    """Keys that the user set: their names in this tree, and what was typed."""
    origins: dict[str, Any] = not_a_key(dict)
    """Where the value of each key comes from (`burnish.config.origin`)."""
