"""``burnish conformance``: a table of every algorithm and every kind of check."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from burnish.conformance.own import REMEDIES, own_algorithms
from burnish.conformance.suite import (
    COLUMNS,
    Algorithm,
    Outcome,
    built_in_algorithms,
    run_checks,
    select,
)
from burnish.utils.console import console, error_console
from burnish.utils.errors import ConfigError

_HEADINGS = {
    "hand answer": "hand\nanswer",
    "naive loop": "naive\nloop",
    "gradient": "grad-\nient",
    "padding": "pad-\nding",
    "row order": "row\norder",
    "group interleaving": "groups",
    "micro-batches": "micro-\nbatch",
    "packing": "pack-\ning",
    "extremes and NaN": "NaN,\nfar",
    "hyper-parameters": "hyper-\nparam.",
}
_STYLES = {"pass": "green", "fail": "bold red", "-": "dim"}
# What the table needs; a pipe or a file has no width of its own.
_WIDTH = 110


def run_conformance(
    *,
    only: Sequence[str],
    estimator: str | None,
    loss: str | None,
    reference: str | None,
    as_json: bool,
    keys: Sequence[str] = (),
) -> int:
    """Checks the built-in algorithms, or the user's own where any is named, and reports; returns the exit status."""
    own = estimator is not None or loss is not None or reference is not None
    if keys and not own:
        raise ConfigError(
            f"{keys[0]}: behind the options go keys of an algorithm of your own, which --estimator or --loss names. One of "
            f"burnish's is chosen by --only=NAME."
        )
    algorithms = select(own_algorithms(estimator, loss, reference, keys) if own else built_in_algorithms(), only)
    started = time.perf_counter()
    outcomes = _run(algorithms)
    seconds = time.perf_counter() - started
    if as_json:
        console.print(json.dumps(_as_json(outcomes, seconds)), soft_wrap=True)
    else:
        _report(outcomes, seconds)
    return int(any(outcome.failures for outcome in outcomes))


def _run(algorithms: Sequence[Algorithm]) -> list[Outcome]:
    outcomes = []
    with error_console.status("") as status:
        for number, algorithm in enumerate(algorithms, start=1):
            status.update(f"{number} of {len(algorithms)}: {algorithm.kind} {algorithm.name}")
            outcomes.append(run_checks(algorithm))
    return outcomes


def _report(outcomes: Sequence[Outcome], seconds: float) -> None:
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(_table(outcomes))
    console.print("\n".join(f"{column}: {meaning}" for column, meaning in COLUMNS.items()), style="dim")
    for outcome in outcomes:
        for sentence, columns in _by_sentence(outcome).items():
            console.print(Text(f"\n{outcome.algorithm.name}, {columns}", style="bold red"))
            console.print(Text(sentence), soft_wrap=True)
        for remedy in _remedies(outcome):
            console.print(Text(f"\n{remedy}"), soft_wrap=True)
    failed = sum(len(outcome.failures) for outcome in outcomes)
    total = sum(len(outcome.checked) for outcome in outcomes)
    algorithms = "1 algorithm" if len(outcomes) == 1 else f"{len(outcomes)} algorithms"
    console.print(f"\n{total - failed} of {total} checks of {algorithms} passed in {seconds:.0f} s.")


def _remedies(outcome: Outcome) -> list[str]:
    """What may help with a user's own algorithm that passes some checks and fails others."""
    algorithm, failed = outcome.algorithm, outcome.failures
    if ":" not in algorithm.name or len(failed) == len(outcome.checked):
        return []
    return list(dict.fromkeys(REMEDIES[algorithm.kind, name] for name in failed if (algorithm.kind, name) in REMEDIES))


def _by_sentence(outcome: Outcome) -> dict[str, str]:
    """What is wrong, and the columns of the checks that say so."""
    columns: dict[str, list[str]] = {}
    for column, sentence in outcome.failures.items():
        columns.setdefault(sentence, []).append(column)
    return {
        sentence: "every check" if len(of_it) == len(outcome.checked) > 1 else ", ".join(of_it)
        for sentence, of_it in columns.items()
    }


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(_HEADINGS.get(column, column))
    for kind, of_kind in groupby(outcomes, key=lambda outcome: outcome.algorithm.kind):
        table.add_row(Text(kind, style="bold"))
        for outcome in of_kind:
            cells = [outcome.cell(column) for column in COLUMNS]
            table.add_row(f"  {outcome.algorithm.name}", *(Text(cell, style=_STYLES[cell]) for cell in cells))
    return table


def _as_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    return {
        "passed": sum(len(outcome.checked) - len(outcome.failures) for outcome in outcomes),
        "failed": sum(len(outcome.failures) for outcome in outcomes),
        "seconds": round(seconds, 1),
        "algorithms": [
            {
                "kind": outcome.algorithm.kind,
                "name": outcome.algorithm.name,
                "checks": {column: outcome.cell(column) for column in COLUMNS},
                "failures": outcome.failures,
            }
            for outcome in outcomes
        ],
    }
