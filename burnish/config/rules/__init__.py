"""Keys that are not in the tree but that people type: renamed, without effect here, or refused.

A name ending in ``.*`` stands for everything below it.
"""

from burnish.config.rules.no_effect import NO_EFFECT
from burnish.config.rules.refused import REFUSED, Refusal
from burnish.config.rules.renamed import GLOBAL_MICRO_BATCHES, RENAMED, rename

__all__ = ["GLOBAL_MICRO_BATCHES", "NO_EFFECT", "REFUSED", "RENAMED", "Refusal", "known_names", "lookup", "rename"]


def lookup(key: str, table: dict) -> object | None:
    """The table's entry for ``key``, or for the nearest ``prefix.*`` above it."""
    if key in table:
        return table[key]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:length]) + ".*"
        if pattern in table:
            return table[pattern]
    return None


def known_names() -> list[str]:
    """Every exact name in the tables, for did-you-mean."""
    return [name for table in (RENAMED, NO_EFFECT, REFUSED, GLOBAL_MICRO_BATCHES) for name in table if "*" not in name]
