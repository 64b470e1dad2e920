"""The reward of the GRPO benchmark, as verl calls one."""

from typing import Any

from benchmarks.grpo_work import score


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """The share of even digits."""
    return score(solution_str)
