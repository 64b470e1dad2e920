"""`data`: the datasets and how prompts are made of them."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(Section):
    """A dataset class of your own."""

    path: str | None = key(None, is_path=True)
    """Python file that defines it."""
    name: str | None = key(None)
    """Its name in that file."""


@dataclass(kw_only=True, slots=True)
class SamplerConfig(Section):
    """The order of the training rows."""

    name: str = key("shuffle", choices=("shuffle", "curriculum"))
    """shuffle: as `data.shuffle` says. curriculum: from easy to hard in every epoch, by `difficulty_key` or, without it, by
    the scores that the policy reached so far."""
    difficulty_key: str | None = key(None)
    """Column, or entry of `extra_info`, with the difficulty of a row as a number, for the curriculum."""
    class_path: str | None = key(None, is_path=True)
    """Python file that defines a sampler class of your own, instead of `name`."""
    class_name: str | None = key(None)
    """Its name in that file."""


@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """Datasets."""

    train_files: list[str] = key(["~/data/rlhf/gsm8k/train.parquet"], is_path=True)
    """What to train on: files (parquet, jsonl, json, csv; the last three also as .gz), patterns, folders, data sets of the
    hub as `org/name:configuration:split`."""
    val_files: list[str] | dict[str, Any] = key(["~/data/rlhf/gsm8k/test.parquet"], is_path=True)
    """What to validate on, likewise; `{name: files}`: several sets, each with metrics of its own; null: no validation."""
    train_max_samples: int = key(-1, ge=-1)
    """Rows of the training data that are used; -1: all."""
    val_max_samples: int = key(-1, ge=-1)
    """Rows of the validation data that are used, of each set where they have names; -1: all."""
    prompt_key: str = key("prompt")
    """Column with the prompt: messages, or a string."""
    answer_key: str | None = key(None)
    """Column with the right answer; null: `reward_model.ground_truth`, or the column `ground_truth`."""
    system_prompt: str | None = key(None, blank=True)
    """System message that is put before prompts that have none; null: none."""
    reward_fn_key: str = key("data_source")
    """Column that chooses the reward function."""
    default_data_source: str | None = key(None)
    """What stands in for `reward_fn_key` in rows without it; null: "unknown"."""
    tool_config_path: str | None = key(None, is_path=True)
    """File (YAML or JSON) with the schemas of tools that the prompts show; a column `tools` goes before it."""
    max_prompt_length: int = key(512, ge=1)
    """Tokens of a prompt, at most."""
    max_response_length: int = key(512, ge=1)
    """Tokens of a response, at most."""
    train_batch_size: int = key(1024, ge=1)
    """Prompts of one step; each is answered `actor_rollout_ref.rollout.n` times."""
    val_batch_size: int | None = key(None, ge=1)
    """Prompts of one validation batch; null: the whole dataset."""
    shuffle: bool = key(True)
    """Another order of the training rows in every epoch."""
    validation_shuffle: bool = key(False)
    """Shuffle the validation rows, once."""
    seed: int = key(None, follows="trainer.seed", ge=0, le=2**32 - 1)
    """Seed of the order."""
    dataloader_num_workers: int = key(0, ge=0)
    """Processes that read rows ahead; 0: the driver itself."""
    filter_overlong_prompts: bool = key(False)
    """Leave out training prompts longer than `max_prompt_length`, counted; a validation prompt keeps its end instead."""
    filter_overlong_prompts_workers: int = key(1, ge=1)
    """Processes that render and measure the prompts of a large set (more than 20,000 rows)."""
    truncation: str = key("error", choices=("error", "left", "right", "middle", "drop"))
    """What happens to a prompt longer than `max_prompt_length`."""
    cache_dir: str | None = key(None, is_path=True)
    """Folder where rendered data sets are kept for the next run with the same files, tokenizer and keys; null: nowhere."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Further arguments of the chat template (`enable_thinking` and the like)."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A dataset class of your own."""
    custom: dict[str, Any] = key({})
    """Keys of your own dataset class or sampler (`data.custom.alpha=0.3`); it reads them as `config.custom["alpha"]`."""
    sampler: SamplerConfig = section(SamplerConfig)
    """A sampler of your own."""
