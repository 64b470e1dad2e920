"""Scores of how long a response is; one of several functions, with a weight:

    reward.functions.length.path=pkg://burnish.reward.functions.length reward.functions.length.name=over_limit

Length is counted in words (what white space parts) or in characters of the text. A penalty in tokens near the response's
limit is `reward.reward_kwargs.overlong_buffer_cfg`, which no function needs.
"""

import math
from typing import Any, Literal

from burnish.utils.errors import RewardError

Unit = Literal["words", "characters"]


def over_limit(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    start: int,
    limit: int,
    unit: Unit = "words",
) -> float:
    """0 up to the length ``start``, then falling in a line to -1 at ``limit``, -1 beyond: DAPO's soft punishment
    (arXiv:2503.14476, eq. 13) in words.

    Raises:
        RewardError: not 0 <= start < limit.
    """
    if not 0 <= start < limit:
        raise RewardError(f"length.over_limit needs 0 <= start < limit, not start={start} and limit={limit}.")
    return -min(max(_length(solution_str, unit) - start, 0) / (limit - start), 1.0)


def near_target(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    target: int | None = None,
    slope: float = 0.0003,
    unit: Unit = "words",
) -> float:
    """-``slope`` * abs(length - target): L1's penalty (arXiv:2503.04697, eq. 1). The target is ``target``, or else the
    row's own, ``extra_info["target_length"]``.

    Raises:
        RewardError: neither is given.
    """
    wanted = target if target is not None else (extra_info or {}).get("target_length")
    if isinstance(wanted, bool) or not isinstance(wanted, (int, float)):
        raise RewardError(
            f"length.near_target needs a target length, in reward_kwargs.target or in the row's "
            f"extra_info.target_length, not {wanted!r:.80}."
        )
    return -slope * abs(_length(solution_str, unit) - wanted)


def cosine(
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    data_source: str = "",
    limit: int,
    at_zero: float = 1.0,
    at_limit: float = 0.0,
    unit: Unit = "words",
) -> float:
    """From ``at_zero`` for an empty response along half a cosine to ``at_limit`` at the length ``limit``, and there
    beyond (arXiv:2502.03373, eq. 1, for one sign of the answer).

    Raises:
        RewardError: ``limit`` is not positive.
    """
    if limit <= 0:
        raise RewardError(f"length.cosine needs a positive limit, not {limit}.")
    share = min(_length(solution_str, unit) / limit, 1.0)
    return at_limit + 0.5 * (at_zero - at_limit) * (1 + math.cos(math.pi * share))


def _length(text: str, unit: Unit) -> int:
    if unit not in ("words", "characters"):
        raise RewardError(f"The unit {unit!r} of a length must be 'words' or 'characters'.")
    return len(text.split()) if unit == "words" else len(text)
