"""The manager that calls the reward function for each response."""

from burnish.reward.managers.base import BaseRewardManager, register_reward_manager


@register_reward_manager("naive")
class NaiveRewardManager(BaseRewardManager):
    """Calls the reward function for each response, see `BaseRewardManager`."""


# All managers keep what a reward function returns beside its score, which is what GDPO reads.
register_reward_manager("gdpo")(NaiveRewardManager)
