"""Responses to scores: reward managers and the functions that they call."""

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
from burnish.reward.result import RewardResult

__all__ = [
    "SCORE_FUNCTIONS",
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardManager",
    "RewardResult",
    "check_data_sources",
    "check_score_function",
    "default_compute_score",
    "get_custom_reward_fn",
    "get_reward_manager_cls",
    "load_reward_manager",
    "register_reward_manager",
]
