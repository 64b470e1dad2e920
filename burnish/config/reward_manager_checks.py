"""Checks of the reward manager, and of the servers that rewards are asked from."""

from collections.abc import Iterator

from burnish.config import names
from burnish.config.build import shown
from burnish.config.schema import leaves
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import near
from burnish.utils.errors import ConfigError

_NAME = "reward.reward_manager.name"
_SOURCE = "reward.reward_manager.source"
_FILE = "reward.reward_manager.module.path"


def check_reward_manager(config: PPOTrainerConfig) -> None:
    """The manager is one that exists or a class of the user's own, and has what it asks for.

    Raises:
        ConfigError: it has not.
    """
    manager = config.reward.reward_manager
    if (manager.source == "importlib") != (manager.module.path is not None):
        if manager.module.path is None:
            raise ConfigError(f"{shown(config, _SOURCE)} needs {_FILE}: the file that defines the manager.")
        raise ConfigError(f"{shown(config, _FILE)} needs {_SOURCE}=importlib and {_NAME}: the class in that file.")
    if manager.source == "register" and ":" not in manager.name and manager.name not in names.REWARD_MANAGERS:
        close = near(manager.name, names.REWARD_MANAGERS)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{shown(config, _NAME)}: {manager.name!r} is no value of this key.{hint} There is: "
            f"{', '.join(names.REWARD_MANAGERS)}. Your own is named as package.module:attribute, or lies in a file: "
            f"{_SOURCE}=importlib {_FILE}=my_manager.py."
        )
    if manager.name == "remote" and config.reward.remote.url is None:
        raise ConfigError(f"{shown(config, _NAME)} needs reward.remote.url: where the rows are posted to.")
    if manager.name == "remote" and config.reward.custom_reward_function.path is not None:
        raise ConfigError(
            f"{shown(config, _NAME)} and {shown(config, 'reward.custom_reward_function.path')}: the server scores, so the "
            f"function would never be called. Unset one."
        )
    if manager.name in ("prime", "rate_limited") and config.reward.num_workers == 0:
        raise ConfigError(
            f"{shown(config, 'reward.num_workers')} with {shown(config, _NAME)}: this manager calls the function in "
            f"processes. Leave their number to reward.num_workers=auto, or take naive."
        )
    _check_judge(config)


def _check_judge(config: PPOTrainerConfig) -> None:
    reward = config.reward
    if reward.judge.url is None:
        return
    if reward.judge.model is None:
        raise ConfigError(
            f"{shown(config, 'reward.judge.url')} needs reward.judge.model: the model's name on that server."
        )
    if reward.custom_reward_function.path is not None:
        raise ConfigError(
            f"{shown(config, 'reward.judge.url')} and {shown(config, 'reward.custom_reward_function.path')}: each is the "
            f"reward function. Unset one, or give both weights: reward.functions.judge.path=pkg://burnish.reward.judge "
            f"beside your own."
        )
    if reward.functions:
        raise ConfigError(
            f"{shown(config, 'reward.judge.url')} and reward.functions: each says what the score is. Make the judge one of "
            f"them: reward.functions.judge.path=pkg://burnish.reward.judge, its settings under "
            f"reward.functions.judge.reward_kwargs."
        )
    if reward.reward_manager.name in ("remote", "batch"):
        raise ConfigError(
            f"{shown(config, 'reward.judge.url')} with {shown(config, _NAME)}: that manager does not ask a judge. Take "
            f"naive, dapo or rate_limited."
        )


def unused_of_reward_services(config: PPOTrainerConfig) -> Iterator[tuple[str, str]]:
    """Keys of servers that are not asked, with the reason; a manager of the user's own may read any."""
    manager = config.reward.reward_manager
    if manager.source == "importlib" or ":" in manager.name:
        return
    idle = {
        "reward.judge.": None if config.reward.judge.url else "there is no reward.judge.url",
        "reward.remote.": None if manager.name == "remote" else shown(config, _NAME),
        "reward.rate_limit.": None if manager.name == "rate_limited" else shown(config, _NAME),
    }
    for key in leaves():
        for prefix, reason in idle.items():
            if reason is not None and key.startswith(prefix):
                yield key, reason
    if config.reward.judge.url and manager.name == "rate_limited":
        for name in ("max_attempts", "retry_delay"):
            yield f"reward.judge.{name}", f"{shown(config, _NAME)} sends again by its own rules"
    if config.reward.judge.num_votes == 1 and config.reward.judge.url:
        yield "reward.judge.vote", shown(config, "reward.judge.num_votes")
