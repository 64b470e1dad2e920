"""Keys that others leave without effect, in the sections that both trees have; and the sentences that tell it."""

from collections.abc import Iterator, Mapping

from burnish.config import names
from burnish.config.build import shown, value_of
from burnish.config.origin import RESOLVED
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


def without_size(config: AnyConfig, switch: str, size: str) -> Iterator[str]:
    """A switch that the user set to false, and that became true because there is no size to cut micro-batches by."""
    origin = config.origins.get(switch)
    if switch in config.set_keys and origin is not None and origin.giver == RESOLVED:
        yield (
            f"{shown(config, switch)} has no effect: without {size} micro-batches are cut by tokens. Set {size} to cut them "
            f"by samples."
        )


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
    shares = {f"{optim}.{name}_ratio": f"{optim}.{name}" for name in ("lr_warmup_steps", "lr_decay_steps")}
    yield from ((share, shown(config, steps)) for share, steps in shares.items() if value_of(config, steps) >= 0)
    warms_up_by_share = (
        value_of(config, f"{optim}.lr_warmup_steps") < 0 < value_of(config, f"{optim}.lr_warmup_steps_ratio")
    )
    if schedule == "constant" and not warms_up_by_share:
        yield f"{optim}.total_training_steps", f"the schedule in use is {schedule}, without a share that warms up"
    optimizer = value_of(config, f"{optim}.optimizer")
    if optimizer in names.OPTIMIZERS_WITHOUT_BETAS:
        yield f"{optim}.betas", f"the optimizer in use is {optimizer}"
    if ":" in optimizer:
        yield f"{optim}.optimizer_impl", f"{shown(config, f'{optim}.optimizer')} names its module"


def unused_of_run(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Of the section ``trainer``, and of what several workers need."""
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        yield "trainer.total_epochs", shown(config, "trainer.total_training_steps")
    if trainer.controller == "local":
        for key in ("ray_kwargs.ray_init", "trainer.balance_batch", "nccl_timeout", "actor_rollout_ref.nccl_timeout"):
            yield key, "the one worker runs in the driver's process (trainer.controller=local)"


def unused_of_adapters(config: AnyConfig, model: str) -> Iterator[tuple[str, str]]:
    """Of the adapters of the section ``model``: those of a folder are as they were made."""
    path, rank = f"{model}.lora_adapter_path", f"{model}.lora_rank"
    from_folder = value_of(config, path) is not None
    if from_folder or not value_of(config, rank):
        reason = shown(config, path if from_folder else rank)
        for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_seed"):
            yield f"{model}.{name}", reason


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
