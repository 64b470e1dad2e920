"""The manager for reward functions that ask a service with limits."""

from collections.abc import Callable
from typing import Any

from burnish.config.reward import RewardConfig
from burnish.reward.judge import Judge
from burnish.reward.limited_scorer import LimitedScorer
from burnish.reward.managers.base import register_reward_manager
from burnish.reward.managers.naive import NaiveRewardManager
from burnish.reward.scorers import Scorer
from burnish.utils.errors import ConfigError


@register_reward_manager("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, and calls begin only as ``reward.rate_limit`` allows: so many a minute, so many tokens a
    minute, so many at once. A call whose service is busy is made again, later.

    The limits hold for one process that scores; where several do, each keeps to its part of them (``num_sharing``).

    Raises:
        ConfigError: ``reward.num_workers=0``.
    """

    num_sharing = 1
    """Processes that score at the same time, this one among them."""

    def __init__(
        self,
        tokenizer: Any,
        compute_score: Callable[..., Any] | None = None,
        config: RewardConfig | None = None,
        num_examine: int = 0,
    ) -> None:
        if isinstance(compute_score, Judge):
            compute_score = compute_score.once()  # It would ask again on its own, past the limits.
        super().__init__(tokenizer, compute_score, config, num_examine)
        if self.config.num_workers == 0:
            raise ConfigError(
                "reward.num_workers=0 with reward.reward_manager.name=rate_limited: this manager calls the function in "
                "processes, so that reward.rate_limit.timeout can end a call. Leave the number to reward.num_workers=auto."
            )

    def scorer(self) -> Scorer:
        """The calls that wait for their turn, and the processes that make them, which start now."""
        if self._scorer is None:
            self._scorer = LimitedScorer(self.compute_score, self.config, num_sharing=self.num_sharing)
        return self._scorer
