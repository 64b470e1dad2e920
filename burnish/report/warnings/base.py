"""What a warning is, what rules look at, and how they are found.

Each rule is a function of what was read. A rule says nothing where its metrics are missing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.report.rollouts import Row
from burnish.report.series import Series

RECENT = 20
"""Steps that "now" is."""
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """One thing that looks wrong.

    Attributes:
        kind: its name, for tests and links.
        severity: "bad": the run probably wastes its time; "warning": look at it.
        title: a few words.
        seen: what was measured, in a sentence with numbers.
        why: what it means.
        tries: what to do, the likeliest first.
        metrics: names of curves that show it.
        steps: where it was seen; empty: all over the run.
    """

    kind: str
    severity: str
    title: str
    seen: str
    why: str
    tries: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at."""

    series: Series
    train: dict[int, list[Row]]
    """Dumped responses of training, by step."""
    events: Sequence[Mapping[str, Any]] = ()


Rule = Callable[[Evidence], Iterator[Warning]]
_RULES: list[Rule] = []


def find_warnings(
    series: Series, train: dict[int, list[Row]], events: Sequence[Mapping[str, Any]] = ()
) -> list[Warning]:
    """All that looks wrong, the worst first."""
    evidence = Evidence(series, train, events)
    found = [warning for rule in _RULES for warning in rule(evidence)]
    return sorted(found, key=lambda warning: warning.severity != "bad")


def rule(function: Rule) -> Rule:
    """Adds a rule to those that every report applies."""
    _RULES.append(function)
    return function


def recent_mean(points: Points, num_steps: int = RECENT) -> float:
    """The mean over the last points; NaN without any."""
    values = [value for _, value in points[-num_steps:]]
    return sum(values) / len(values) if values else math.nan


def span(steps: Sequence[int]) -> str:
    """Steps in words: "step 7", "steps 3, 9 and 12", "41 steps from 3 to 180"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 4:
        return f"steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
