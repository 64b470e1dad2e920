"""Results of runs that learn: read from run folders, summarized over seeds, kept as small files, printed as tables, drawn.

    python -m benchmarks.results --table docs/results/grpo-chain_sum.json docs/results/ppo-chain_sum.json
    python -m benchmarks.results --plot curves.png docs/results/grpo-*.json
    python -m benchmarks.results --save log.txt         # results that a benchmark printed on another machine, into docs/results

A *run* is a dict of plain values, one seed. `read_run` makes it of a run's folder; whoever has figures of another trainer
fills in the same keys, of which only ``seed`` and ``curve`` are needed:

    seed, steps
    seconds            wall clock from the first step's begin to the end, validations and saving included; train_seconds without
    before, after      {"accuracy", "low", "high", "num_prompts", "samples"}: held-out prompts, 95 % Wilson interval
    base               likewise, of the model before a supervised start, where the run had one
    curve              [[step, accuracy], ...], step 0 is before training
    train_reward       [mean score of each step's responses, ...]
    loss               [[step, validation loss], ...] of a supervised run
    stage_seconds      {stage: median of the steps}, `step` among them; the first step, which warms up, is left out
    response_tokens_per_s, trained_tokens_per_s      medians: tokens sampled / seconds of sampling; tokens / seconds of the update
    mfu                {stage: median}
    memory_gib         {"gpu_allocated", "gpu_reserved"} at most, or {"computer"}: what all programs of the computer had
    what_ran           {configuration key: value} of all that is neither a default nor worked out from other keys
    side_by_side       runs that shared the device; 1 where it was alone. Speeds of shared runs are not summarized
    machine, commit    where and of what it ran, if not where and of what the result was written last

A *result* is what `write_result` writes: the runs, their `summarize`, and where they ran.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import burnish
from benchmarks.results.figures import Run, accuracy_interval, held_out, read_run, shown
from burnish.trainer.intervals import interval
from burnish.utils.json_lines import replacing

__all__ = ["accuracy_interval", "held_out", "plot", "read_result", "read_run", "summarize", "table", "write_result"]
RESULTS = Path(__file__).parents[2] / "docs" / "results"
MOST_BYTES = 60_000
"""Of a result's file and of a figure: they are kept in the repository."""


# ---------------------------------------------------------------------------------------------------- all seeds


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Means over seeds, each with Student's 95 % interval of the mean (None for one seed) and the single values.

    Speeds and memory are of the runs that had the device to themselves; there are none where no run had.
    """
    alone = [run for run in runs if run.get("side_by_side", 1) == 1]
    summary: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for key in ("base", "before", "after"):
        if values := [run[key]["accuracy"] for run in runs if key in run]:
            summary[key] = over_seeds(values)
    if gains := [run["after"]["accuracy"] - run["before"]["accuracy"] for run in runs if "before" in run]:
        summary["gain"] = over_seeds(gains)
    if prompts := [run["after"]["num_prompts"] for run in runs if "after" in run]:
        summary["num_prompts"] = min(prompts)
    for key in ("seconds", "response_tokens_per_s", "trained_tokens_per_s"):
        if values := [run[key] for run in alone if key in run]:
            summary[key] = over_seeds(values)
    for key in ("stage_seconds", "mfu", "memory_gib"):
        names = sorted({name for run in alone for name in run.get(key, {})})
        if names:
            summary[key] = {
                name: statistics.fmean(run[key][name] for run in alone if name in run.get(key, {})) for name in names
            }
    summary["curve"] = mean_curve([run["curve"] for run in runs if run.get("curve")])
    return summary


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """``{"mean", "low", "high", "values"}``."""
    # As files have them: a seed read back and one that just ended are the same number.
    values = _rounded(list(values))
    found = interval(values)  # type: ignore[arg-type]
    return {"mean": statistics.fmean(values), "low": found.low, "high": found.high, "values": list(values)}


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[dict[str, float]]:
    """``[{"step", "mean", "min", "max"}, ...]`` at the steps that every curve has."""
    by_step = [{int(step): value for step, value in curve} for curve in curves]
    common = sorted(set.intersection(*(set(curve) for curve in by_step))) if by_step else []
    points = []
    for step in common:
        values = [curve[step] for curve in by_step]
        points.append({"step": step, "mean": statistics.fmean(values), "min": min(values), "max": max(values)})
    return points


# ---------------------------------------------------------------------------------------------------- files


def write_result(
    name: str, runs: Sequence[Run], *, extra: dict[str, Any] | None = None, folder: str | Path = RESULTS
) -> Path:
    """Writes ``<folder>/<name>.json``: the runs by seed, their summary, machine, commit, versions, the command line.

    Args:
        extra: further keys at the top, as ``title``, ``model``, ``task``.

    Raises:
        ValueError: no run, a key of ``extra`` that is taken, or a file that would be too large.
    """
    if not runs:
        raise ValueError(f"{name}: there is no run to write.")
    ordered = sorted(runs, key=lambda run: (run["seed"] is None, run["seed"]))
    what_ran = in_common([run.get("what_ran", {}) for run in ordered])
    kept = [
        run | {"what_ran": {key: value for key, value in run.get("what_ran", {}).items() if key not in what_ran}}
        for run in ordered
    ]
    result = {"name": name, **place(), "what_ran": what_ran, "summary": summarize(ordered), "runs": kept}
    if taken := sorted(set(extra or {}) & set(result)):
        raise ValueError(f"{name}: the keys {', '.join(taken)} of a result are not for extra figures.")
    text = json.dumps(_rounded({**result, **(extra or {})}), separators=(",", ":"), allow_nan=False) + "\n"
    if len(text) > MOST_BYTES:
        raise ValueError(f"{name}: {len(text)} bytes are more than a result's {MOST_BYTES}; keep less of each step.")
    path = Path(folder) / f"{name}.json"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def read_result(path: str | Path) -> dict[str, Any]:
    """What `write_result` wrote, each run with all of its ``what_ran``."""
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    if "what_ran" in result:
        for run in result["runs"]:
            run["what_ran"] = result["what_ran"] | run["what_ran"]
    return result


def save_printed(text: str, folder: str | Path = RESULTS) -> list[Path]:
    """Writes the results that stand in a text, each on a line of its own, as ``--json`` prints them; replaces what is there.

    Raises:
        ValueError: there is none, or a name that is none of a file.
    """
    paths = []
    for line in text.splitlines():
        if not line.startswith('{"name":'):
            continue
        result = json.loads(line)
        if Path(result["name"]).name != result["name"] or len(line) > MOST_BYTES:
            raise ValueError(f"{result['name'][:80]!r}: not the name of a result, or {len(line)} bytes are too many.")
        path = Path(folder) / f"{result['name']}.json"
        with replacing(path) as temporary:
            temporary.write_text(line + "\n", encoding="utf-8")
        paths.append(path)
    if not paths:
        raise ValueError('There is no result in it: a line that begins with {"name":.')
    return paths


def in_common(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The keys that have the same value everywhere."""
    first, *others = settings
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)}


def device(machine: str) -> str:
    """Of a machine, what seeds that make one mean must have in common: the GPU and torch; without a GPU all of it.

    Args:
        machine: as `benchmarks.demo.machine` says it.
    """
    _, gpu, torch = machine.rsplit(", ", 2)
    return machine if gpu == "no GPU" else f"{gpu}, {torch}"


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Writes what a benchmark without seeds has measured, with where and of what it ran (`place`)."""
    text = json.dumps(_rounded(place() | figures), separators=(",", ":"), allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def place() -> dict[str, Any]:
    """Where and with what this process runs: date, machine, commit, versions, the command line."""
    from benchmarks.demo import machine

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
        "command": command_line(),
    }


def commit() -> str | None:
    """The commit of the source tree, with ``+`` where files differ from it; None outside a repository."""
    root = Path(__file__).parents[2]
    stated = root / ".commit"  # a copy of the tree without its repository
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return stated.read_text().strip() if stated.exists() else None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures, those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(str(part) for part in sys.version_info[:3]), "burnish": burnish.__version__}
    for name in ("torch", "transformers", "vllm", "trl", "verl", "reasoning-gym"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """As one would type it in the source tree's root."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    begin = (
        f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else f"python {Path(sys.argv[0]).name}"
    )
    return " ".join([begin, *(str(shown(word)) for word in sys.argv[1:])])


def _rounded(value: Any) -> Any:
    """Numbers with five significant digits; those that are not finite as null, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


# ---------------------------------------------------------------------------------------------------- for people


def table(paths: Iterable[str | Path]) -> str:
    """A table in Markdown, a row a result: accuracy before and after with intervals over seeds, seconds, speeds, memory."""
    head = (
        "| run | seeds | held-out accuracy before | after | seconds | seconds a step | sampled tokens/s "
        "| trained tokens/s | MFU of the update | peak GiB |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(_row(read_result(path)) for path in paths)])


def _row(result: dict[str, Any]) -> str:
    summary = result["summary"]
    memory = summary.get("memory_gib", {})
    mfu = summary.get("mfu", {}).get("actor")
    cells = [
        result.get("title", result["name"]),
        str(len(summary["seeds"])),
        " base, then ".join(filter(None, (_accuracy(result, "base"), _accuracy(result, "before")))),
        _accuracy(result, "after"),
        _mean(summary, "seconds", ".0f"),
        _stages(summary.get("stage_seconds", {})),
        _mean(summary, "response_tokens_per_s", ",.0f"),
        _mean(summary, "trained_tokens_per_s", ",.0f"),
        "" if mfu is None else f"{100 * mfu:.0f} %",
        f"{memory['gpu_allocated']:.1f}" if "gpu_allocated" in memory else "",
    ]
    return f"| {' | '.join(cells)} |"


def _stages(seconds: dict[str, float]) -> str:
    """The step, and its stages that take a fiftieth of it or more, longest first."""
    if "step" not in seconds:
        return ""
    beside = ("step", "testing", "save_checkpoint")  # of few steps, and after them
    parts = sorted((part for part in seconds.items() if part[0] not in beside), key=lambda part: -part[1])
    told = [f"{name} {value:.2f}" for name, value in parts if value >= seconds["step"] / 50]
    return f"{seconds['step']:.2f}: {', '.join(told)}"


def _mean(summary: dict[str, Any], key: str, form: str) -> str:
    return format(summary[key]["mean"], form) if key in summary else ""


def _accuracy(result: dict[str, Any], key: str) -> str:
    """The mean over seeds with Student's interval; of one seed its own with Wilson's over the held-out prompts."""
    found = result["summary"].get(key)
    if found is None:
        return ""
    low, high = found["low"], found["high"]
    if low is None:
        single = next(run[key] for run in result["runs"] if key in run)
        low, high = single["low"], single["high"]
    # Student's interval of a share may pass its ends.
    return f"{100 * found['mean']:.1f} % ({100 * max(0.0, low):.1f}, {100 * min(1.0, high):.1f})"


def plot(paths: Sequence[str | Path], png: str | Path) -> Path:
    """Held-out accuracy and training reward over the steps: a line a result, the mean of its seeds, with their band."""
    from benchmarks.results.plots import draw

    return draw([read_result(path) for path in paths], Path(png), most_bytes=MOST_BYTES)
