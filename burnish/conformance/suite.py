"""Which algorithms there are, which checks each of them has, and what comes of running them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.conformance.comparison import Violation
from burnish.conformance.correction import Correction, correction_checks, corrections
from burnish.conformance.estimators import Estimator, built_in_estimators, estimator_checks
from burnish.conformance.losses import (
    LossTerm,
    aggregation_modes,
    kl_forms,
    loss_checks,
    policy_losses,
    value_loss,
)
from burnish.conformance.own import check_result, file_of
from burnish.utils.errors import BurnishError, ConfigError
from burnish.utils.foreign_code import Caught, told

COLUMNS: dict[str, str] = {
    "hand answer": "what was worked out on paper",
    "naive loop": "loops over rows and tokens in float64, written from the definitions",
    "gradient": "finite differences of those loops",
    "padding": "columns of padding change nothing",
    "row order": "the order of the rows changes nothing",
    "group interleaving": "groups are found by name, wherever their rows lie",
    "micro-batches": "losses, gradients and metrics of micro-batches add up",
    "ranks": "gradients averaged over two ranks are those of one",
    "packing": "the gradient of a model in the trainer's engine, however rows are packed",
    "fp32": "float32 inputs give what float64 gives for the same numbers",
    "bf16": "so do bfloat16 inputs",
    "extremes and NaN": "nothing outside the mask counts, NaN inside surfaces, far-apart policies stay finite",
    "hyper-parameters": "each does what it is documented to do",
}
"""The kinds of checks, in the order of the table, and what each compares with or asks for."""

Algorithm = Estimator | LossTerm | Correction


@dataclass(frozen=True)
class Outcome:
    """What the checks of one algorithm said.

    Attributes:
        checked: the columns that apply to it.
        failures: column and sentence of each check that failed.
    """

    algorithm: Algorithm
    checked: tuple[str, ...]
    failures: dict[str, str] = field(default_factory=dict)

    def cell(self, column: str) -> str:
        """pass, fail, or - where the check does not apply."""
        if column not in self.checked:
            return "-"
        return "fail" if column in self.failures else "pass"


def built_in_algorithms() -> list[Algorithm]:
    """Everything that burnish has a name for."""
    return [
        *built_in_estimators(),
        *policy_losses(),
        *kl_forms(),
        *aggregation_modes(),
        value_loss(),
        *corrections(),
    ]


def select(algorithms: Sequence[Algorithm], names: Sequence[str]) -> list[Algorithm]:
    """The algorithms of these names, all of them without any; an estimator and a loss may share one.

    Raises:
        ConfigError: a name that none of them has; lists the choices.
    """
    known = list(dict.fromkeys(algorithm.name for algorithm in algorithms))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"--only={name}: there is no algorithm of that name.{hint} Known: {', '.join(known)}.")
    return [algorithm for algorithm in algorithms if not names or algorithm.name in names]


def checks_of(algorithm: Algorithm) -> dict[str, Callable[[Any], None]]:
    """The checks that say something about ``algorithm``, by column."""
    if isinstance(algorithm, Estimator):
        return estimator_checks(algorithm)
    if isinstance(algorithm, LossTerm):
        return loss_checks(algorithm)
    return correction_checks(algorithm)


def run_checks(algorithm: Algorithm, columns: Collection[str] = tuple(COLUMNS)) -> Outcome:
    """Runs the checks of these columns. Whatever one raises is a failure of the algorithm, in a sentence.

    What cannot be called at all, or returns something else than it must, fails every check for that reason.
    """
    checks = {column: check for column, check in checks_of(algorithm).items() if column in columns}
    if not isinstance(algorithm, Correction):
        wrong = _said_by(check_result, algorithm)
        if wrong is not None:
            return Outcome(algorithm, tuple(checks), dict.fromkeys(checks, wrong))
    said = {column: _said_by(check, algorithm) for column, check in checks.items()}
    return Outcome(algorithm, tuple(checks), {column: sentence for column, sentence in said.items() if sentence})


def _said_by(check: Callable[[Any], None], algorithm: Algorithm) -> str | None:
    """What is wrong with ``algorithm`` by this check; None if nothing is."""
    with Caught() as caught:
        check(algorithm)
    if caught.error is None:
        return None
    if isinstance(caught.error, Violation | BurnishError):
        return str(caught.error)
    return told(caught.error, file_of(algorithm))
