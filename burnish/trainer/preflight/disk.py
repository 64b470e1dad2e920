"""Whether the disk holds the checkpoints that the run will write."""

from collections.abc import Mapping
from typing import Any

from burnish.config import FSDPCriticConfig, Policy, PPOTrainerConfig, SFTTrainerConfig, policy_of
from burnish.engine.estimate import ModelEstimate, estimate_model
from burnish.engine.state_bytes import optimizer_bytes
from burnish.trainer.preflight.findings import Findings
from burnish.utils import local_paths
from burnish.utils.errors import ModelError
from burnish.utils.machine import free_bytes

_AREA = "disk"
GIB = 2**30


def checkpoint_bytes(config: PPOTrainerConfig | SFTTrainerConfig, models: Mapping[str, ModelEstimate]) -> int:
    """One checkpoint: see `role_bytes`."""
    written = role_bytes(policy_of(config), models["actor"]) if "actor" in models else 0
    if isinstance(config, PPOTrainerConfig) and "critic" in models:
        written += role_bytes(config.critic, models["critic"])
    return written


def role_bytes(section: Policy | FSDPCriticConfig, model: ModelEstimate) -> int:
    """A trained model's part: the model in its dtype, its masters where that has less precision, its moments, and with
    ``hf_model`` the model once more."""
    has_adapters = model.num_trained < model.num_parameters
    contents, whole = section.checkpoint.save_contents, model.num_parameters * model.dtype.itemsize
    written = 0
    if "model" in contents:
        written += model.num_trained * 4 if has_adapters else whole
    if "hf_model" in contents and (has_adapters or "model" not in contents):
        # Beside the same model it is the same files.
        written += whole
    if "optimizer" in contents:
        written += optimizer_bytes(section.optim, model.num_trained)
        written += 4 * model.num_trained if model.dtype.itemsize < 4 and not has_adapters else 0
    return written


def first_checkpoint_bytes(config: PPOTrainerConfig | SFTTrainerConfig) -> int | None:
    """About what the run's first checkpoint takes, from the models' configurations alone; None where these cannot be read."""
    common: dict[str, Any] = {"device": config.trainer.device, "total_memory": 1 << 50}
    policy = policy_of(config)
    try:
        models = {"actor": estimate_model(policy.model, policy.engine, policy.optim, **common)}
        if isinstance(config, PPOTrainerConfig) and config.critic.enable:
            critic = config.critic
            models["critic"] = estimate_model(
                critic.model, critic.model.fsdp_config, critic.optim, module="value", **common
            )
    except ModelError:
        return None
    return checkpoint_bytes(config, models)


def check_disk(
    config: PPOTrainerConfig | SFTTrainerConfig,
    models: Mapping[str, ModelEstimate],
    num_steps: int | None,
    findings: Findings,
) -> None:
    """Compares the free space with the checkpoints that exist at once.

    Args:
        num_steps: of the run; None is not known.
    """
    trainer = config.trainer
    if trainer.save_freq <= 0:
        findings.note(_AREA, "trainer.save_freq saves no checkpoint.", "trainer.save_freq")
        return
    each = checkpoint_bytes(config, models)
    number = trainer.max_actor_ckpt_to_keep or None
    saved = None if num_steps is None else max(1, -(-num_steps // trainer.save_freq))
    # One more than are kept: the new one is complete before the oldest goes. And the best one stays.
    kept = None if number is None else number + 1 + (trainer.keep_best is not None)
    at_once = saved if kept is None else kept if saved is None else min(kept, saved)
    folder = local_paths.expanded(trainer.default_local_dir).absolute()
    existing = next((parent for parent in (folder, *folder.parents) if local_paths.is_dir(parent)), None)
    free = None if existing is None else free_bytes(str(existing))
    needed = each * (at_once or 1)
    findings.facts["disk"] = {"checkpoint_bytes": each, "checkpoints": at_once, "free_bytes": free}
    said = f"a checkpoint takes {each / GIB:.1f} GiB" + (
        f", and {at_once:,} exist at once ({needed / GIB:.1f} GiB)" if at_once is not None else ""
    )
    if free is not None and needed > free:
        findings.error(
            _AREA,
            f"trainer.default_local_dir={trainer.default_local_dir}: {said}, but {free / GIB:.1f} GiB are free there. Set "
            f"trainer.max_actor_ckpt_to_keep, save less often (trainer.save_freq), or choose another disk.",
        )
    else:
        told = "an unknown amount is" if free is None else f"{free / GIB:.1f} GiB are"
        findings.note(_AREA, f"{said[0].upper()}{said[1:]}; {told} free.", "trainer.save_freq")
