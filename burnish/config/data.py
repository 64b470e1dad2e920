"""`data`: the datasets and how prompts are made of them."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class CustomClassConfig(Section):
    """A dataset class of your own."""

    path: str | None = key(None)
    """Python file that defines it."""
    name: str | None = key(None)
    """Its name in that file."""


@dataclass(kw_only=True, slots=True)
class SamplerConfig(Section):
    """A sampler of your own (a curriculum, for instance)."""

    class_path: str | None = key(None)
    """Python file that defines it."""
    class_name: str | None = key(None)
    """Its name in that file."""


@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """Datasets."""

    train_files: list[str] = key(["~/data/rlhf/gsm8k/train.parquet"])
    """Files to train on (parquet or jsonl)."""
    val_files: list[str] = key(["~/data/rlhf/gsm8k/test.parquet"])
    """Files to validate on; null: no validation."""
    train_max_samples: int = key(-1, ge=-1)
    """Rows of the training data that are used; -1: all."""
    val_max_samples: int = key(-1, ge=-1)
    """Rows of the validation data that are used; -1: all."""
    prompt_key: str = key("prompt")
    """Column with the prompt: messages, or a string."""
    reward_fn_key: str = key("data_source")
    """Column that chooses the reward function."""
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
    """Leave out prompts longer than `max_prompt_length`, counted."""
    truncation: str = key("error", choices=("error", "left", "right", "middle", "drop"))
    """What happens to a prompt longer than `max_prompt_length`."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Further arguments of the chat template (`enable_thinking` and the like)."""
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    """A dataset class of your own."""
    sampler: SamplerConfig = section(SamplerConfig)
    """A sampler of your own."""
