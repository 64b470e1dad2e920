"""The manager that also reports what it scored before any punishment of length."""

import torch

from burnish.reward.managers.base import register_reward_manager
from burnish.reward.managers.naive import NaiveRewardManager
from burnish.reward.score import Score
from burnish.reward.shaping import with_acc


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As `NaiveRewardManager`, and every score is also the extra ``acc``, as it was before any punishment of length:
    what dynamic sampling compares, and what validation reports (DAPO, arXiv:2503.14476)."""

    def _shape(self, scores: list[Score], lengths: torch.Tensor) -> list[Score]:
        return super()._shape(with_acc(scores), lengths)
