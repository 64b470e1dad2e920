"""The comparison of learning for people."""

import statistics
from typing import Any

from benchmarks.learning.verdict import FIGURES
from benchmarks.results import Run


def title(side: str, versions: dict[str, str] | None) -> str:
    """Of a side in figures and tables."""
    if versions is None:
        return side
    parts = [
        f"{'TRL' if side == 'trl' else side} {versions[side]}",
        *([f"vLLM {versions['vllm']}"] if "vllm" in versions else []),
    ]
    return " with ".join(parts)


def line(side: str, run: Run) -> str:
    """One run, for people."""
    curve = ", ".join(f"{step}: {100 * accuracy:.1f}" for step, accuracy in run["curve"])
    stages = run["stage_seconds"]
    memory = run.get("gpu_gib", run.get("process_gib"))
    held = "" if memory is None else f", {memory:.2f} GiB"
    return (
        f"{side:8} seed {run['seed']}: accuracy % {curve}; {stages['step']:.3f} s a step (sampling {stages['gen']:.3f}, update "
        f"{stages['update_actor']:.3f}){held}"
    )


def table(runs: dict[str, list[Run]], said: dict[str, Any]) -> str:
    """The comparison as tables in Markdown."""
    sides = list(runs)
    lines = [
        f"| over {len(runs[sides[0]])} seeds | {' | '.join(sides)} | difference | alike within | says |",
        "|---|" + "---|" * (len(sides) + 3),
    ]
    for name, what in FIGURES.items():
        found = said["figures"][name]
        within = "" if found["within"] is None else f"{found['within']:.4f}"
        lines.append(
            f"| {what} | {found['burnish']:.4f} | {found['peer']:.4f} | {found['difference']:+.4f} | {within} | {found['says']} |"
        )
    costs = {
        "seconds of CPU of the whole program": lambda run: run.get("cpu_seconds"),
        "peak memory, GiB": lambda run: run.get("gpu_gib", run.get("process_gib")),
    }
    if all(run.get("side_by_side", 1) == 1 for found in runs.values() for run in found):
        # Beside other programs the clock tells more of them.
        costs = {
            "seconds a step, median": lambda run: run["stage_seconds"]["step"],
            "of sampling": lambda run: run["stage_seconds"]["gen"],
            "of the update": lambda run: run["stage_seconds"]["update_actor"],
            **costs,
        }
    rows = []
    for what, figure in costs.items():
        each = [[figure(run) for run in found] for found in runs.values()]
        if any(value is None for of_side in each for value in of_side):
            continue  # Some run did not measure it: a mean of the others would not be of all seeds.
        values = [statistics.fmean(of_side) for of_side in each]
        rows.append(f"| {what} | {' | '.join(f'{value:.3g}' for value in values)} | {values[1] / values[0]:.2f} |")
    if rows:
        head = f"| mean over seeds | {' | '.join(sides)} | {sides[1]} over {sides[0]} |"
        lines += ["", head, "|---|" + "---|" * (len(sides) + 1), *rows]
    return "\n".join(lines)
