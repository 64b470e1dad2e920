"""Checks of the keys of validation, and of what has no effect where nothing is validated."""

from collections.abc import Iterator

from burnish.config.build import shown
from burnish.config.idle_sections import AnyConfig
from burnish.config.schema import leaves, root_of
from burnish.utils.errors import ConfigError

_KEYS = (
    "data.val_batch_size",
    "data.val_max_samples",
    "data.validation_shuffle",
    "trainer.log_val_generations",
    "trainer.validation_data_dir",
)
_SAMPLING = "actor_rollout_ref.rollout.val_kwargs."


def check_validation_data(config: AnyConfig) -> None:
    """Call it where there is no validation data, which may also be given as rows.

    Raises:
        ConfigError: the run needs some.
    """
    trainer = config.trainer
    if trainer.val_only:
        raise ConfigError("trainer.val_only=true, but there is nothing to validate on. Set data.val_files.")
    if trainer.keep_best is not None:
        raise ConfigError(
            f"trainer.keep_best={trainer.keep_best}, but there is nothing to validate on. Set data.val_files."
        )


def idle_without_validation_data(config: AnyConfig) -> dict[str, str]:
    """Keys that were set and have no effect where there is no validation data, each with the reason."""
    idle = dict.fromkeys(
        _validation_keys(config), f"there is nothing to validate on ({shown(config, 'data.val_files')})"
    )
    if config.trainer.test_freq <= 0:
        del idle["trainer.test_freq"]
    return {key: reason for key, reason in idle.items() if key in config.set_keys}


def unused_of_validation(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Keys that the others leave without effect, each with the reason."""
    trainer = config.trainer
    if trainer.val_only:
        yield "trainer.val_before_train", shown(config, "trainer.val_only")
    elif not trainer.val_before_train and trainer.test_freq <= 0:
        never = f"{shown(config, 'trainer.val_before_train')} and {shown(config, 'trainer.test_freq')} never validate"
        yield from ((key, never) for key in ("data.val_files", *_validation_keys(config)) if key != "trainer.test_freq")


def _validation_keys(config: AnyConfig) -> Iterator[str]:
    yield "trainer.test_freq"
    yield from (key for key in leaves(root_of(config)) if key in _KEYS or key.startswith(_SAMPLING))
