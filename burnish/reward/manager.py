"""The door to reward managers: which one, and with which function."""

import functools
import inspect

from transformers import PreTrainedTokenizerBase

from burnish.config.reward import RewardConfig, RewardManagerConfig
from burnish.protocol import DataProto
from burnish.reward.compute_score import ScoreFunction, default_compute_score, get_custom_reward_fn
from burnish.reward.judge import Judge
from burnish.reward.managers.base import (
    REWARD_MANAGERS,
    BaseRewardManager,
    RewardManager,
    RewardManagerFactory,
    register_reward_manager,
)
from burnish.reward.managers.batch import BatchRewardManager, check_batch_function
from burnish.reward.managers.dapo import DAPORewardManager
from burnish.reward.managers.naive import NaiveRewardManager
from burnish.reward.managers.prime import PrimeRewardManager
from burnish.reward.managers.rate_limited import RateLimitedRewardManager
from burnish.reward.managers.remote import RemoteRewardManager
from burnish.reward.result import RewardResult
from burnish.reward.sandbox.limits import sandbox_settings
from burnish.reward.weighted import get_weighted_reward_fn
from burnish.utils.errors import ConfigError, RewardError
from burnish.utils.extern import load_attribute

__all__ = [
    "REWARD_MANAGERS",
    "BaseRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "RewardManager",
    "RewardManagerFactory",
    "get_reward_manager_cls",
    "load_reward_manager",
    "register_reward_manager",
]


def get_reward_manager_cls(name: str) -> RewardManagerFactory:
    """The manager class called ``name``, or named as ``package.module:attribute``.

    Raises:
        ConfigError: there is none.
    """
    return REWARD_MANAGERS.get(name)


def reward_function(config: RewardConfig) -> ScoreFunction:
    """The function that the ``reward`` section names: the custom one, several with weights, a judge, else the built-in
    ones.

    Raises:
        ConfigError: it cannot be loaded.
    """
    check = check_batch_function if config.reward_manager.name == "batch" else None
    return (
        get_weighted_reward_fn(config)
        or get_custom_reward_fn(config, check)
        or (Judge(config.judge) if config.judge.url else built_in_function(config))
    )


def built_in_function(config: RewardConfig) -> ScoreFunction:
    """`default_compute_score` with the settings of the sandbox bound."""
    return functools.partial(default_compute_score, sandbox=sandbox_settings(config))


def load_reward_manager(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_examine: int = 0,
    compute_score: ScoreFunction | None = None,
) -> RewardManager:
    """The manager that the ``reward`` section names, with ``compute_score``, else `reward_function`.

    Raises:
        ConfigError: the manager or the function cannot be loaded.
    """
    function = compute_score or reward_function(config)
    manager_cls = _manager_class(config.reward_manager)
    given = {"tokenizer": tokenizer, "compute_score": function, "config": config, "num_examine": num_examine}
    asked = f"reward.reward_manager.name={config.reward_manager.name}"
    try:
        inspect.signature(manager_cls).bind(**given)
    except TypeError as error:
        raise ConfigError(f"{asked}: a manager is made with {', '.join(given)}, but for this one {error}.") from error
    manager = manager_cls(**given)
    if not callable(manager):
        raise ConfigError(
            f"{asked}: {type(manager).__name__} has no __call__. A manager is called with a batch and returns a "
            f"burnish.reward.RewardResult; a subclass of NaiveRewardManager does."
        )
    return manager


def result_of(manager: RewardManager, batch: DataProto) -> RewardResult:
    """What a manager, which may be the user's own, makes of a batch.

    Raises:
        RewardError: it is no `RewardResult`.
    """
    result = manager(batch)
    if not isinstance(result, RewardResult):
        raise RewardError(
            f"The reward manager {type(manager).__name__} returned {type(result).__name__}, and a burnish.reward.RewardResult "
            f"is wanted: token_level_scores [batch, response] and valid [batch]. A subclass of NaiveRewardManager makes it of "
            f"what compute_score returns."
        )
    return result


def _manager_class(config: RewardManagerConfig) -> RewardManagerFactory:
    """The registered class, or that of the user's own file."""
    if config.source != "importlib":
        return get_reward_manager_cls(config.name)
    key = "reward.reward_manager.module.path"
    if config.module.path is None:
        raise ConfigError(f"reward.reward_manager.source=importlib needs {key}: the file that defines the manager.")
    found = load_attribute(config.module.path, config.name, key=key)
    if not callable(found):
        raise ConfigError(
            f"reward.reward_manager.name={config.name}: this is {type(found).__name__} in {config.module.path}, not a class "
            f"of reward managers."
        )
    return found
