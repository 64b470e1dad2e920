"""Reward managers at verl's path; they live in `burnish.reward`.

A manager of your own is called with a batch and returns a `burnish.reward.result.RewardResult`, where verl's returns a
tensor or a dict: derive it from `NaiveRewardManager`, or let ``compute_score`` do what it did.
"""

from burnish.reward.manager import BaseRewardManager as AbstractRewardManager
from burnish.reward.manager import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
)
from burnish.reward.manager import register_reward_manager as register

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register",
]
