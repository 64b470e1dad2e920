"""`burnish.reward.functions.gsm8k` at verl's path."""

from burnish.reward.functions.gsm8k import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
