"""What a hyper-parameter does, as a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SettingCase:
    """One thing that the hyper-parameter ``setting`` does: ``check`` takes the algorithm."""

    setting: str
    check: Callable[[Any], None]


def hyper_parameters(algorithm: Any) -> None:
    """Every hyper-parameter does what it is documented to do."""
    for case in algorithm.cases:
        case.check(algorithm)
