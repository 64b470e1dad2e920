"""Metrics of a run as columns: one list of values for each name, all over the same steps."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeGuard

MOST_POINTS = 2000
"""Steps of a curve in the page; of longer runs each pair of points stands for a stretch, its lowest and its highest value."""


class Series:
    """The metrics of a run.

    Attributes:
        steps: in rising order, each once.
        columns: name -> values [steps]; None where a step lacks the metric or its value is not finite.
        non_finite: name -> the steps whose value was NaN or infinite.
        num_odd: values that were no numbers.

    Args:
        rows: ``{"step": n, name: value, ...}``; of two rows of one step the later counts, name by name.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        by_step: dict[int, dict[str, Any]] = {}
        for row in rows:
            step = row.get("step")
            if is_number(step) and math.isfinite(step):
                by_step.setdefault(int(step), {}).update(row)
        self.steps = sorted(by_step)
        self.columns: dict[str, list[float | None]] = {}
        self.non_finite: dict[str, list[int]] = {}
        self.num_odd = 0
        for place, step in enumerate(self.steps):
            for name, value in by_step[step].items():
                if name != "step":
                    self._put(str(name), value, place, step)

    def _put(self, name: str, value: Any, place: int, step: int) -> None:
        if not is_number(value):
            self.num_odd += value is not None
            return
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = [None] * len(self.steps)
        if math.isfinite(value):
            column[place] = value
        else:
            self.non_finite.setdefault(name, []).append(step)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever there is a finite value; none where the metric does not exist."""
        pairs = zip(self.steps, self.columns.get(name, ()), strict=False)
        return [(step, value) for step, value in pairs if value is not None]

    def recent_means(self, num_steps: int = 20) -> dict[str, float]:
        """The mean of each metric over the last steps, as what the run is like now.

        Seconds count as none in a step that does not have them: a stage that every tenth step has takes a tenth of its seconds
        a step. Other metrics are averaged over the steps that have them.
        """
        timed = self.columns.get("timing_s/step", [])
        places = [place for place, value in enumerate(timed) if value is not None] or list(range(len(self.steps)))
        means = {}
        for name, column in self.columns.items():
            values = [column[place] for place in places[-num_steps:]]
            there = [value for value in values if value is not None]
            if there:
                means[name] = sum(there) / (len(values) if name.startswith("timing_s/") else len(there))
        return means

    def totals(self, name: str) -> list[float]:
        """The sum of a metric from the first step up to each step of `thinned`; a step that lacks it adds nothing."""
        column = self.columns.get(name) or [None] * len(self.steps)
        sums = dict(zip(self.steps, accumulate(value or 0.0 for value in column), strict=True))
        return [sums[step] for step in self.thinned_steps()]

    def thinned_steps(self) -> list[int]:
        """The steps of `thinned`."""
        if len(self.steps) <= MOST_POINTS:
            return self.steps
        width = self._width()
        return [step for start in range(0, len(self.steps), width) for step in _ends(self.steps[start : start + width])]

    def _width(self) -> int:
        return -(-len(self.steps) // (MOST_POINTS // 2))

    def thinned(self) -> tuple[list[int], dict[str, list[float | None]]]:
        """Steps and columns for the page: rounded to six digits, and at most `MOST_POINTS` steps.

        Of a long run every stretch of steps becomes two points that hold each curve's lowest and highest value there, in their
        order, so that no spike is lost.
        """
        if len(self.steps) <= MOST_POINTS:
            return self.steps, {name: [_round(value) for value in column] for name, column in self.columns.items()}
        width = self._width()
        starts = range(0, len(self.steps), width)
        columns = {
            name: [value for start in starts for value in _extremes(column[start : start + width])]
            for name, column in self.columns.items()
        }
        return self.thinned_steps(), columns


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a number that a float can be made of."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 1 << 1000


def _ends(steps: Sequence[int]) -> tuple[int, ...]:
    return (steps[0], steps[-1]) if len(steps) > 1 else (steps[0],)


def _extremes(values: Sequence[float | None]) -> tuple[float | None, ...]:
    there = [(value, place) for place, value in enumerate(values) if value is not None]
    if len(values) == 1:
        return (_round(values[0]),)
    if not there:
        return None, None
    low, high = min(there), max(there)
    first, second = sorted((low, high), key=lambda pair: pair[1])
    if first == second:
        return _round(first[0]), None
    return _round(first[0]), _round(second[0])


def _round(value: float | None) -> float | int | None:
    if value is None:
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
