"""The manager that always uses processes."""

from typing import Any

from burnish.reward.managers.base import register_reward_manager
from burnish.reward.managers.naive import NaiveRewardManager
from burnish.reward.scorers import Scorer, make_pool
from burnish.utils.errors import ConfigError


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, with every reward function in processes, also those built-in ones that cannot hang: each
    response has its time limit, and one that runs into it fails alone.

    Raises:
        ConfigError: ``reward.num_workers=0``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.num_workers == 0:
            raise ConfigError(
                "reward.num_workers=0 with reward.reward_manager.name=prime: this manager scores in processes. Take naive, or "
                "leave the number to reward.num_workers=auto."
            )

    def scorer(self) -> Scorer:
        """The processes, which start now."""
        if self._scorer is None:
            self._scorer = make_pool(self.compute_score, self.config)
        return self._scorer
