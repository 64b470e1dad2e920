"""The manager that asks a server for scores."""

import math
from typing import Any

from burnish.config.reward import RewardConfig
from burnish.reward.async_scorer import AsyncScorer
from burnish.reward.compute_score import ScoreFunction
from burnish.reward.managers.base import BaseRewardManager, register_reward_manager
from burnish.reward.remote import RemoteRewards
from burnish.reward.scorers import Scorer, is_built_in
from burnish.utils.errors import ConfigError


@register_reward_manager("remote")
class RemoteRewardManager(BaseRewardManager):
    """Posts responses to the server of ``reward.remote``, several in one request; see `burnish.reward.remote` for what
    travels. A request that gets no usable answer fails its rows (``reward.on_error``).

    Raises:
        ConfigError: no address, or a reward function is given too.
    """

    num_sharing = 1
    """Processes that score at the same time, this one among them; each keeps to its part of ``max_concurrent``."""

    def __init__(
        self,
        tokenizer: Any,
        compute_score: ScoreFunction | None = None,
        config: RewardConfig | None = None,
        num_examine: int = 0,
    ) -> None:
        config = config or RewardConfig()
        if compute_score is not None and not is_built_in(compute_score):
            raise ConfigError(
                "reward.reward_manager.name=remote: the server scores, so the reward function that is given would never be "
                "called. Leave it out, or take another manager."
            )
        self._rewards = RemoteRewards(config.remote)
        super().__init__(tokenizer, self._rewards, config, num_examine)

    def scorer(self) -> Scorer:
        """The queue of rows on their way to the server."""
        if self._scorer is None:
            remote = self.config.remote
            max_calls = math.ceil(remote.max_concurrent / self.num_sharing)
            self._scorer = AsyncScorer(self._rewards.score, rows_per_call=remote.rows_per_request, max_calls=max_calls)
        return self._scorer
