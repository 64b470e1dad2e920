"""`burnish.reward.functions.dapo_math` at verl's path."""

from burnish.reward.functions.dapo_math import compute_score

__all__ = ["compute_score"]
