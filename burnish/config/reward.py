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
    """`naive` calls it for each response."""


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
class RewardConfig(Section):
    """Rewards."""

    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    """Who calls the reward function."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A reward function of your own."""
    on_error: str = key("abstain", choices=("abstain", "raise"))
    """A reward function that raises: `abstain` counts the response, leaves it out of training and goes on unless all
    of a step failed; `raise` stops the run."""
