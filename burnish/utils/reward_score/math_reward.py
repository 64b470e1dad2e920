"""`burnish.reward.functions.hendrycks_math` at verl's path."""

from burnish.reward.functions.hendrycks_math import compute_score

__all__ = ["compute_score"]
