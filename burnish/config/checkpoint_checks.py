"""Checks of the keys that say when a run saves, what it keeps, and from where it goes on."""

from collections.abc import Iterator

from burnish.config.build import shown
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils.errors import ConfigError

# Of both trees.
_SECTIONS = ("checkpoint", "actor_rollout_ref.actor.checkpoint", "critic.checkpoint")


def check_checkpoints(config: PPOTrainerConfig | SFTTrainerConfig) -> None:
    """Keys that say one thing together."""
    _check_resume(config)
    _check_best(config)
    trainer = config.trainer
    if "://" in trainer.default_local_dir:
        raise ConfigError(
            f"{shown(config, 'trainer.default_local_dir')}: a run writes to this machine's disk first. Name a folder here, and "
            f"the URL in trainer.default_hdfs_dir, which every checkpoint is copied to."
        )
    if trainer.del_local_ckpt_after_load and trainer.default_hdfs_dir is None:
        raise ConfigError(
            "trainer.del_local_ckpt_after_load=true would delete the only copy of the checkpoint that a run goes on from. Set "
            "trainer.default_hdfs_dir, which every checkpoint is copied to."
        )
    actor, critic = trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep
    if actor and critic and critic > actor and "trainer.max_critic_ckpt_to_keep" in config.set_keys:
        raise ConfigError(
            f"{shown(config, 'trainer.max_critic_ckpt_to_keep')}: a critic lies in its policy's checkpoint, and of those "
            f"{shown(config, 'trainer.max_actor_ckpt_to_keep')} are kept. Give at most {actor}."
        )


def _check_resume(config: PPOTrainerConfig | SFTTrainerConfig) -> None:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: a checkpoint's folder global_step_N. "
            "trainer.resume_mode=auto finds the newest in trainer.default_local_dir by itself."
        )
    if mode != "resume_path" and path is not None:
        raise ConfigError(
            f"{shown(config, 'trainer.resume_from_path')} is taken only with trainer.resume_mode=resume_path, but "
            f"there is {shown(config, 'trainer.resume_mode')}."
        )


def _check_best(config: PPOTrainerConfig | SFTTrainerConfig) -> None:
    trainer = config.trainer
    if trainer.keep_best is None:
        return
    asked = shown(config, "trainer.keep_best")
    if isinstance(config, SFTTrainerConfig):
        if not trainer.keep_best.startswith("val/"):
            raise ConfigError(
                f"{asked}: the best checkpoint is chosen by a metric of the validation, whose names begin with val/ "
                f"(docs/sft.md), as val/loss."
            )
    elif not trainer.keep_best.startswith("val-"):
        raise ConfigError(
            f"{asked}: the best checkpoint is chosen by a metric of the validation, whose names begin with val-core/ or "
            f"val-aux/ (docs/metrics.md), as val-core/gsm8k/acc/mean@1."
        )
    if trainer.save_freq <= 0:
        raise ConfigError(f"{asked}: {shown(config, 'trainer.save_freq')} saves no checkpoint. Set trainer.save_freq.")
    if trainer.test_freq <= 0:
        raise ConfigError(
            f"{asked}: {shown(config, 'trainer.test_freq')} never validates what was trained. Set trainer.test_freq."
        )


def unused_of_checkpoints(config: PPOTrainerConfig | SFTTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys that the others leave without effect, each with the reason."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        reason = shown(config, "trainer.save_freq")
        for name in (
            "on_save_error",
            "max_actor_ckpt_to_keep",
            "max_critic_ckpt_to_keep",
            "esi_redundant_time",
        ):
            yield f"trainer.{name}", reason
        for section in _SECTIONS:
            yield f"{section}.async_save", reason
    if trainer.keep_best is None:
        yield "trainer.keep_best_mode", shown(config, "trainer.keep_best")
    if isinstance(config, PPOTrainerConfig) and not config.critic.enable:
        yield "trainer.max_critic_ckpt_to_keep", "there is no critic"
    if trainer.resume_mode == "disable":
        yield "trainer.del_local_ckpt_after_load", shown(config, "trainer.resume_mode")
        neither = f"{shown(config, 'trainer.resume_mode')} and {shown(config, 'trainer.save_freq')}"
        if trainer.save_freq <= 0:
            yield "trainer.default_hdfs_dir", neither
        for section in _SECTIONS:
            yield f"{section}.load_contents", shown(config, "trainer.resume_mode")
            if trainer.save_freq <= 0:
                yield f"{section}.save_contents", neither
