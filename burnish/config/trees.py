"""The two trees of keys: of reinforcement learning (``burnish train``) and of supervised fine-tuning (``burnish sft``)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config import rules
from burnish.config.schema import Leaf, leaves, root_of, sections
from burnish.config.section import Section
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig

_RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree of keys, with what belongs to it.

    Attributes:
        root: its class.
        command: that takes its keys, in words.
        rules: for names that are not in it.
        recipes: the folder of its recipes.
        base_name: the recipe that changes nothing, which groups are put on top of.
        own_keys: where users' own parts find keys of their own: beginning of a key, what the part is, where its keys go.
        page: of the documentation that lists the keys.
    """

    root: Any
    command: str
    rules: rules.Rules
    recipes: Path
    base_name: str
    own_keys: tuple[tuple[str, str, str], ...] = ()
    page: str = "docs/config.md"

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Every key of the tree."""
        return leaves(self.root)

    @property
    def sections(self) -> dict[str, type[Section]]:
        """Every section of the tree."""
        return sections(self.root)


RL = Tree(
    root=PPOTrainerConfig,
    command="burnish train",
    rules=rules.RL,
    recipes=_RECIPES,
    base_name="ppo_trainer",
    own_keys=(
        ("algorithm.", "estimator", "algorithm.custom"),
        ("actor_rollout_ref.actor.policy_loss.", "policy loss", "actor_rollout_ref.actor.policy_loss.custom"),
        ("reward.reward_kwargs.", "reward manager", "reward.reward_kwargs.custom"),
        ("data.", "dataset or sampler", "data.custom"),
    ),
)
SFT = Tree(
    root=SFTTrainerConfig,
    command="burnish sft (and of burnish check with --sft)",
    rules=rules.SFT,
    recipes=_RECIPES / "sft",
    base_name="sft_trainer",
    own_keys=(("data.", "dataset", "data.custom"),),
)


def tree_of(config: Section) -> Tree:
    """The tree that a whole configuration is of."""
    return SFT if issubclass(root_of(config), SFTTrainerConfig) else RL
