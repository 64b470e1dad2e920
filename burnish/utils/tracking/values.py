"""Metrics as plain numbers, whatever they come as."""

import logging
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from burnish.utils.foreign_code import Caught, form

logger = logging.getLogger("burnish.tracking")

DROPPED = "logging/dropped_values"


class NumbersOnly:
    """Lets numbers through. What is none is left out, counted in ``logging/dropped_values`` and told once under its name."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, data: Mapping[Any, Any]) -> dict[str, int | float]:
        """The metrics that are numbers: Python's, numpy's, tensors and arrays of one; NaN and infinities stay."""
        kept: dict[str, int | float] = {}
        dropped = 0
        for key, value in data.items():
            number = value if type(value) is float else as_number(value)
            if number is None:
                dropped += 1
                self._tell(str(key), value)
            else:
                kept[str(key)] = number
        if dropped:
            kept[DROPPED] = float(dropped)
        return kept

    def _tell(self, key: str, value: Any) -> None:
        if key not in self._told:
            self._told.add(key)
            shown = f": {value!r:.100}" if isinstance(value, str) else ""
            logger.warning("The metric %s is %s%s and no number; it is not logged.", key, form(value), shown)


def as_number(value: Any) -> int | float | None:
    """``value`` as a number of Python, None where it is not one number."""
    with Caught():
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, int):
            # What no float holds no service takes.
            return value if abs(value) < 1 << 1023 else None
        if isinstance(value, float | Decimal | numbers.Real):
            return float(value)
    return None
