"""What the page is given: runs as plain lists and dictionaries, the way the scripts in `page/` read them."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from burnish.report.choose import Chosen, choose, index_of
from burnish.report.read import RunFolder
from burnish.report.rollouts import histograms
from burnish.report.series import Series
from burnish.report.tokens import Pieces
from burnish.report.warnings import find_warnings
from burnish.trainer.ppo.bottleneck import explain, stage_seconds
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError

_MOST_EVENTS = 2000
_AXES = {"tokens": "perf/total_num_tokens", "seconds": "timing_s/step"}


def describe(run: RunFolder, chosen: Mapping[str, Chosen]) -> dict[str, Any]:
    """A run for the page: everything but the responses themselves, which are in the chunks of ``chosen``."""
    series = run.series
    steps, metrics = series.thinned()
    train = run.dumps["train"].index
    events = run.events
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status(),
        "steps": steps,
        "num_steps": len(series.steps),
        # The other axes of curves: of every step, which the curves of a long run do not have.
        "axes": {name: [float(f"{total:.9g}") for total in series.totals(metric)] for name, metric in _AXES.items()},
        "metrics": metrics,
        "non_finite": {name: len(steps) for name, steps in series.non_finite.items()},
        "rows_of_a_step": _rows_of_a_step(run),
        "stages": _stages(series),
        "warnings": [dataclasses.asdict(warning) for warning in find_warnings(series, train, events)],
        "bottleneck": _bottleneck(run),
        "histograms": {kind: histograms(dumps.index) for kind, dumps in run.dumps.items() if dumps.index},
        "events": events[-_MOST_EVENTS:],
        "config": run.configuration(),
        "files": run.files(),
        **describe_rollouts(run, chosen),
    }


def describe_rollouts(run: RunFolder, chosen: Mapping[str, Chosen]) -> dict[str, Any]:
    """What of `describe` depends on which responses the page has."""
    there = {kind: dumps for kind, dumps in run.dumps.items() if dumps.index}
    kept = {kind: chosen[kind].rows if kind in chosen else {} for kind in there}
    return {
        "rollouts": {kind: index_of(kept[kind], dumps.index) for kind, dumps in there.items()},
        "notes": [*run.notes, *_notes(run, kept)],
    }


def choose_rollouts(run: RunFolder, budget: int, tokenizer: Pieces | None, most_rows: int) -> dict[str, Chosen]:
    """The responses of a run that the page has, by kind; training and validation share the budget by their sizes.

    Args:
        budget: bytes that they take in the page.
    """
    sizes = {
        kind: sum(row.length + 20 * (row.num_tokens or 0) for rows in dumps.index.values() for row in rows)
        for kind, dumps in run.dumps.items()
    }
    total = sum(sizes.values()) or 1
    chosen = {}
    # What the smaller kind leaves of its share goes to the larger one.
    for kind in sorted(sizes, key=lambda kind: sizes[kind]):
        share = 1.0 if total == sizes[kind] else max(0.2, sizes[kind] / total)
        chosen[kind] = choose(run.dumps[kind], tokenizer, int(budget * share), max(1, int(most_rows * share)))
        budget -= chosen[kind].size
        most_rows -= sum(map(len, chosen[kind].rows.values()))
        total -= sizes[kind]
    return chosen


def load_pieces(run: RunFolder, tokenizer: str | None) -> Pieces | None:
    """What gives tokens their texts: the tokenizer that was named, or the run's, where it lies on this computer.

    Raises:
        ConfigError: the named one cannot be used.
    """
    if tokenizer is not None:
        path = local_paths.expanded(tokenizer)
        file = path / "tokenizer.json" if local_paths.is_dir(path) else path
        if not local_paths.is_file(file):
            raise ConfigError(f"--tokenizer={tokenizer}: there is no tokenizer.json. Name the folder of a model.")
    else:
        found = run.tokenizer_file()
        if found is None:
            return None
        file = found
    try:
        return Pieces(file)
    except Exception as error:  # The package raises Exception itself for a file that it cannot use.
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer={tokenizer}: {file} is no tokenizer: {error}.") from error
        return None


def payload(runs: list[dict[str, Any]], *, live: bool, tokens_have_text: bool) -> dict[str, Any]:
    """The whole of what the page's scripts read first."""
    return {"generated": time.time(), "live": live, "tokens_have_text": tokens_have_text, "runs": runs}


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _stages(series: Series) -> dict[str, Any]:
    """Seconds of each stage at the steps of the timeline; long runs have the mean of several steps in one place."""
    names = [name for name in series.columns if name.startswith("timing_s/")]
    rows = []
    for place, step in enumerate(series.steps):
        timed = {name: value for name in names if (value := series.columns[name][place]) is not None}
        if seconds := stage_seconds(timed):
            rows.append((step, seconds))
    width = -(-len(rows) // 200) or 1
    groups = [rows[start : start + width] for start in range(0, len(rows), width)]
    order = list(dict.fromkeys(stage for _, seconds in rows for stage in seconds))
    return {
        "steps": [group[0][0] for group in groups],
        "width": width,
        "seconds": {
            stage: [round(sum(seconds.get(stage, 0.0) for _, seconds in group) / len(group), 5) for group in groups]
            for stage in order
        },
    }


def _bottleneck(run: RunFolder) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in explain(run.series.recent_means(), run.config)]


def _notes(run: RunFolder, rows: Mapping[str, Mapping[int, Any]]) -> list[str]:
    notes = []
    num_events = len(run.events)
    for kind, kept_rows in rows.items():
        total = sum(map(len, run.dumps[kind].index.values()))
        kept = sum(map(len, kept_rows.values()))
        if kept < total:
            notes.append(
                f"{kind} rollouts: {kept:,} of {total:,} dumped responses are in this page, more of the newest steps than of "
                f"older ones, and the same prompts at every step. Distributions and warnings count all of them."
            )
    expected = _rows_of_a_step(run)
    train = run.dumps["train"].index
    if train and expected and max(map(len, train.values())) < expected:
        notes.append(
            f"The run keeps {max(map(len, train.values()))} of the {expected:,} responses of a step (trainer.sample_rollouts); "
            f"trainer.rollout_data_dir keeps all. Distributions are of those that were kept."
        )
    if len(run.series.thinned_steps()) < len(run.series.steps):
        notes.append(
            f"Curves of {len(run.series.steps):,} steps are drawn by the lowest and the highest value of each stretch."
        )
    if num_events > _MOST_EVENTS:
        notes.append(f"The newest {_MOST_EVENTS:,} of {num_events:,} events are shown.")
    return notes


def _rows_of_a_step(run: RunFolder) -> int:
    rows = run.series.points("training/num_rows")
    return int(max(value for _, value in rows)) if rows else 0
