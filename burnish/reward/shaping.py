"""What becomes of a score between the reward function and the batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from burnish.config.reward import RewardKwargsConfig
from burnish.core_algos.reward_shaping import overlong_penalty
from burnish.reward.score import Score
from burnish.utils.errors import ConfigError


def with_acc(scores: Sequence[Score]) -> list[Score]:
    """The scores, each also as the extra ``acc``, unless the function returned one of that name or no score."""
    return [
        score if score.value is None else replace(score, extras={"acc": score.value} | score.extras) for score in scores
    ]


def check_overlong_buffer(config: RewardKwargsConfig) -> None:
    """Checks that the punishment of long responses has a limit to count from, and a buffer that lies before it.

    Raises:
        ConfigError: names the key.
    """
    if config.max_resp_len is None:
        raise ConfigError(
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true needs reward.reward_kwargs.max_resp_len, the length "
            "limit that it counts from (data.max_response_length)."
        )
    overlong_penalty(torch.tensor([0]), config.max_resp_len, config.overlong_buffer_cfg.len, 0.0)


def punish_overlong(scores: Sequence[Score], lengths: torch.Tensor, config: RewardKwargsConfig) -> list[Score]:
    """The scores with `overlong_penalty` added; the score before it stays visible as ``acc``.

    Rows without a score get no penalty either. With ``overlong_buffer_cfg.log`` each row that has a score says what it
    got: the extras ``overlong_reward`` (the penalty) and ``overlong`` (whether there was one).

    Args:
        lengths: tokens of each response, up to and including the last one that the policy sampled [batch].
    """
    buffer = config.overlong_buffer_cfg
    penalties = overlong_penalty(lengths, config.max_resp_len, buffer.len, buffer.penalty_factor).tolist()
    shaped = []
    for score, penalty in zip(with_acc(scores), penalties, strict=True):
        if score.value is None:
            shaped.append(score)
            continue
        told = {"overlong_reward": penalty, "overlong": penalty < 0} if buffer.log else {}
        shaped.append(replace(score.plus(penalty), extras=score.extras | told))
    return shaped
