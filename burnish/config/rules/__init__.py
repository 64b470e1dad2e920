"""Keys that are not in the tree but that people type: renamed, without effect here, or refused.

A name ending in ``.*`` stands for everything below it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.config.rules import sft
from burnish.config.rules.bare_names import BARE_NAMES
from burnish.config.rules.no_effect import NO_EFFECT
from burnish.config.rules.refused import REFUSED, Refusal
from burnish.config.rules.renamed import GLOBAL_MICRO_BATCHES, ONCE_NULL, RENAMED, rename

__all__ = [
    "BARE_NAMES",
    "GLOBAL_MICRO_BATCHES",
    "NO_EFFECT",
    "REFUSED",
    "RENAMED",
    "RL",
    "SFT",
    "Refusal",
    "Rules",
    "known_names",
    "lookup",
    "rename",
]


def lookup(key: str, table: Mapping) -> object | None:
    """The table's entry for ``key``, or for the nearest ``prefix.*`` above it."""
    if key in table:
        return table[key]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:length]) + ".*"
        if pattern in table:
            return table[pattern]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The tables of one tree of keys."""

    renamed: Mapping[str, str]
    no_effect: Mapping[str, str]
    refused: Mapping[str, Refusal]
    global_micro_batches: Mapping[str, str]
    once_null: frozenset[str] = frozenset()

    def rename(self, key: str) -> str:
        """The name that ``key`` has in the tree (its own, where it has no other)."""
        return rename(key, self.renamed)

    def known_names(self) -> list[str]:
        """Every exact name in the tables, for did-you-mean."""
        tables = (self.renamed, self.no_effect, self.refused, self.global_micro_batches)
        return [name for table in tables for name in table if "*" not in name]


RL = Rules(
    renamed=RENAMED,
    no_effect=NO_EFFECT,
    refused=REFUSED,
    global_micro_batches=GLOBAL_MICRO_BATCHES,
    once_null=ONCE_NULL,
)
SFT = Rules(
    renamed=sft.RENAMED,
    no_effect=sft.NO_EFFECT,
    refused=sft.REFUSED,
    global_micro_batches=sft.GLOBAL_MICRO_BATCHES,
)


def known_names() -> list[str]:
    """Every exact name in the tables of reinforcement learning."""
    return RL.known_names()
