"""`burnish.reward.functions.hendrycks_math` at the older of verl's paths."""

from burnish.reward.functions.hendrycks_math import compute_score

__all__ = ["compute_score"]
