"""Checks of the keys that say which responses are kept, and which are trained on again."""

import os
from collections.abc import Iterator

from burnish.config.build import shown
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError


def check_dumps(config: PPOTrainerConfig) -> None:
    """Every folder has one use: files of training and of validation have the same names."""
    trainer = config.trainer
    if (trainer.replay_rollouts or "").lower() == "false":
        # A word for none, as null is, and no folder.
        trainer.replay_rollouts = None
    folders = {
        f"trainer.{name}": folder
        for name, folder in (
            ("rollout_data_dir", trainer.rollout_data_dir),
            ("validation_data_dir", trainer.validation_data_dir),
            ("replay_rollouts", trainer.replay_rollouts),
        )
        if folder
    }
    if not trainer.rollout_data_dir and trainer.sample_rollouts:
        folders["trainer.default_local_dir"] = os.path.join(trainer.default_local_dir, "rollouts")
    seen: dict[str, str] = {}
    for key, folder in folders.items():
        if "://" in folder:
            raise ConfigError(f"{key}={folder}: responses are kept on this machine's disk. Name a folder.")
        place = os.path.realpath(local_paths.expanded(folder))
        if place in seen:
            raise ConfigError(
                f"{seen[place]} and {key} are the same folder, {folder}, where one would overwrite the other."
            )
        seen[place] = key


def samples_responses(config: PPOTrainerConfig, *, has_validation: bool) -> bool:
    """Whether the run needs a rollout engine: not where it replays and never validates."""
    trainer = config.trainer
    validates = trainer.val_before_train or trainer.val_only or trainer.test_freq > 0
    return trainer.replay_rollouts is None or (has_validation and validates)


def unused_of_dumps(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys that the others leave without effect, each with the reason."""
    trainer = config.trainer
    if trainer.rollout_data_dir:
        yield "trainer.sample_rollouts", shown(config, "trainer.rollout_data_dir")
    if trainer.replay_rollouts is None:
        yield "trainer.replay_rewards", shown(config, "trainer.replay_rollouts")
