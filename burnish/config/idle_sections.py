"""Keys that others leave without effect, in the sections that both trees have; and the sentences that tell it."""

from collections.abc import Iterator, Mapping

from burnish.config import names
from burnish.config.build import shown, value_of
from burnish.config.schema import leaves, root_of
from burnish.config.settings import is_of_shipped_recipe
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig

AnyConfig = PPOTrainerConfig | SFTTrainerConfig

# Keys of a sharded layout alone.
SHARDED_KEYS = ("reshard_after_forward", "forward_prefetch", "defer_gradient_sync", "offload_policy")


def idle_sentences(config: AnyConfig, idle: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each reason. Keys that are set to their defaults change nothing, and what a recipe of ours sets is
    nobody's mistake: they are not named.

    Args:
        idle: keys that were set, with the reason why they have no effect.
    """
    by_reason: dict[str, list[str]] = {}
    for key, reason in idle.items():
        if not _is_default(config, key) and not is_of_shipped_recipe(config.set_keys[key]):
            by_reason.setdefault(reason, []).append(shown(config, key))
    for reason, keys in by_reason.items():
        yield f"No effect here: {', '.join(keys)}. The reason: {reason}."


def _is_default(config: AnyConfig, key: str) -> bool:
    leaf, value = leaves(root_of(config))[key], value_of(config, key)
    return value == (value_of(config, leaf.follows) if leaf.follows else leaf.default)


def unused_of_optimizer(config: AnyConfig, optim: str) -> Iterator[tuple[str, str]]:
    """Of the optimizer in the section ``optim``."""
    schedule = value_of(config, f"{optim}.lr_scheduler_type")
    readers = {
        "min_lr_ratio": ("linear", "cosine", "wsd"),
        "num_cycles": ("cosine",),
        "lr_decay_steps": ("wsd",),
        "lr_decay_steps_ratio": ("wsd",),
    }
    for name, schedules in readers.items():
        if schedule not in schedules:
            yield f"{optim}.{name}", f"the schedule in use is {schedule}"
    optimizer = value_of(config, f"{optim}.optimizer")
    if optimizer in names.OPTIMIZERS_WITHOUT_BETAS:
        yield f"{optim}.betas", f"the optimizer in use is {optimizer}"


def unused_of_adapters(config: AnyConfig, model: str) -> Iterator[tuple[str, str]]:
    """Of the adapters of the section ``model``: those of a folder are as they were made."""
    path, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    from_folder = value_of(config, path) is not None
    if from_folder or not value_of(config, rank):
        for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_seed"):
            yield f"{model}.{name}", shown(config, path if from_folder else rank)


def unused_of_layout(config: AnyConfig, layout: str, *, is_sharded: bool, why: str) -> Iterator[tuple[str, str]]:
    """Of a layout, the section ``layout``.

    Args:
        why: the model is not sharded, if it is not.
    """
    if not is_sharded:
        for name in SHARDED_KEYS:
            yield f"{layout}.{name}", f"each worker has a whole copy of the model ({why})"
    elif value_of(config, f"{layout}.offload_policy"):
        for name in ("param_offload", "optimizer_offload"):
            yield f"{layout}.{name}", f"{shown(config, f'{layout}.offload_policy')} keeps that on the CPU already"
