"""Score functions at the path where verl's scripts import them; they live in `burnish.reward`.

Their first two arguments are verl's, ``compute_score(solution_str, ground_truth)``; others go by name.
"""

from burnish.reward.compute_score import default_compute_score

_default_compute_score = default_compute_score

__all__ = ["default_compute_score"]
