"""`reward`: from responses to scores."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class RewardManagerConfig(Section):
    """Who calls the reward function."""

    name: str = key("naive", choices=names.REWARD_MANAGERS, planned=names.PLANNED_REWARD_MANAGERS, plug_in=True)
    """`naive` calls it for each response; `dapo` also reports the score as `acc`, before any punishment of length."""


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig(Section):
    """A reward function of your own."""

    path: str | None = key(None)
    """Python file that defines it; null: the built-in function that `data.reward_fn_key` chooses."""
    name: str = key("compute_score")
    """Its name in that file."""
    reward_kwargs: dict[str, Any] = key({})
    """Further arguments it is called with."""


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(Section):
    """DAPO's soft punishment of responses that come near the length limit (arXiv:2503.14476)."""

    enable: bool = key(False)
    """Add min(-(length - (max_resp_len - len)) / len * penalty_factor, 0) to the score."""
    len: int = key(512, ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = key(1.0, ge=0)
    """The penalty at the limit."""
    log: bool = key(False)
    """Log the penalty and the share of responses that got one."""


@dataclass(kw_only=True, slots=True)
class RewardKwargsConfig(Section):
    """Arguments of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)
    """Punishment of long responses."""
    max_resp_len: int = key(None, follows="data.max_response_length", ge=1)
    """The length limit that it counts from."""
    custom: dict[str, Any] = key({})
    """Keys of your own manager (`reward.reward_kwargs.custom.alpha=0.3`); it reads them as
    `config.reward_kwargs.custom["alpha"]`."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """Rewards."""

    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    """Who calls the reward function."""
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    """Arguments of the reward manager."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A reward function of your own."""
    on_error: str = key("abstain", choices=("abstain", "raise"))
    """A reward function that raises: `abstain` counts the response, leaves it out of training and goes on unless all
    of a step failed; `raise` stops the run."""
