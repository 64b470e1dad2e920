"""`burnish.reward.functions.search_qa` at verl's path."""

from burnish.reward.functions.search_qa import compute_score

__all__ = ["compute_score"]
