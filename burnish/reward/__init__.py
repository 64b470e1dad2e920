"""Responses to scores: reward managers and the functions that they call."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.reward.compute_score import (
        SCORE_FUNCTIONS,
        check_data_sources,
        check_score_function,
        default_compute_score,
        get_custom_reward_fn,
    )
    from burnish.reward.manager import (
        DAPORewardManager,
        NaiveRewardManager,
        RewardManager,
        get_reward_manager_cls,
        load_reward_manager,
        register_reward_manager,
    )
    from burnish.reward.pool import Outcome, RewardPool
    from burnish.reward.result import RewardResult

__all__ = [
    "SCORE_FUNCTIONS",
    "DAPORewardManager",
    "NaiveRewardManager",
    "Outcome",
    "RewardManager",
    "RewardPool",
    "RewardResult",
    "check_data_sources",
    "check_score_function",
    "default_compute_score",
    "get_custom_reward_fn",
    "get_reward_manager_cls",
    "load_reward_manager",
    "register_reward_manager",
]

# Looked up on first use: a reward process loads this package, and must not load torch for that.
_HOMES = {
    "compute_score": (
        "SCORE_FUNCTIONS",
        "check_data_sources",
        "check_score_function",
        "default_compute_score",
        "get_custom_reward_fn",
    ),
    "manager": (
        "DAPORewardManager",
        "NaiveRewardManager",
        "RewardManager",
        "get_reward_manager_cls",
        "load_reward_manager",
        "register_reward_manager",
    ),
    "pool": ("Outcome", "RewardPool"),
    "result": ("RewardResult",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"burnish.reward.{module}"), name)
    raise AttributeError(f"module 'burnish.reward' has no attribute {name!r}")
