"""The figures of one run, read from its folder; `benchmarks.results` says what they are."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.trainer.intervals import wilson
from burnish.utils.json_lines import read_lines

Run = dict[str, Any]
SET_BY_THE_USER = ("command line", "recipe", "config file", "python")
UNTOLD = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")


def read_run(run_dir: str | Path, *, side_by_side: int = 1) -> Run:
    """The figures of a run's folder.

    Args:
        run_dir: has ``metrics.jsonl``, ``events.jsonl``, ``config_origin.json``.
        side_by_side: runs that shared the device with it, itself included.

    Raises:
        ValueError: there is no finished step.
    """
    folder = Path(run_dir)
    lines = [line for line in _lines(folder / "metrics.jsonl") if not line.get("training/failed")]
    steps = [line for line in lines if line["step"] > 0 and "timing_s/step" in line]
    if not steps:
        raise ValueError(f"{folder}: metrics.jsonl has no finished step, so there is nothing to report.")
    warm = steps[1:] or steps
    config = _settings(folder)
    validations = [(line["step"], found) for line in lines if (found := held_out(line)) is not None]
    run: Run = {
        "seed": config.get("trainer.seed", {}).get("value"),
        "steps": steps[-1]["step"],
        "seconds": _seconds(folder, steps),
        "train_seconds": sum(line["timing_s/step"] for line in steps),
        "curve": [[step, found["accuracy"]] for step, found in validations],
        "train_reward": [line["critic/score/mean"] for line in steps if "critic/score/mean" in line],
        "loss": [[line["step"], line["val/loss"]] for line in lines if "val/loss" in line],
        "stage_seconds": {
            name: statistics.median(line[f"timing_s/{name}"] for line in warm if f"timing_s/{name}" in line)
            for name in _names(warm, "timing_s/")
        },
        "response_tokens_per_s": _median(
            warm, lambda line: line["perf/rollout/response_tokens"] / line["timing_s/gen"]
        ),
        "trained_tokens_per_s": _median(warm, lambda line: line["perf/total_num_tokens"] / _update_seconds(line)),
        "mfu": {
            name: statistics.median(line[f"perf/mfu/{name}"] for line in warm if f"perf/mfu/{name}" in line)
            for name in _names(warm, "perf/mfu/")
        },
        "memory_gib": _memory(steps),
        "what_ran": {
            key: shown(entry["value"])
            for key, entry in config.items()
            if entry["origin"].startswith(SET_BY_THE_USER) and key not in UNTOLD
        },
        "side_by_side": side_by_side,
    }
    if validations:
        run["before"], run["after"] = validations[0][1], validations[-1][1]
        if validations[0][0] != 0:
            del run["before"]
    return {key: value for key, value in run.items() if value not in (None, [], {})}


def held_out(line: dict[str, Any]) -> dict[str, Any] | None:
    """Accuracy in a step's metrics with its interval, a mean over all held-out prompts; None where nothing was validated.

    It is ``acc`` where the reward function returns that, else the score, which has to lie in [0, 1].
    """
    found = []
    for key in line:
        _, _, rest = key.partition("/")
        if not key.startswith("val-core/") or "/mean@" not in rest:
            continue
        source, variable, mean = rest.rsplit("/", 2)
        samples = mean.removeprefix("mean@")
        error = line.get(f"val-aux/{source}/{variable}/stderr@{samples}")
        prompts = line[f"val-aux/{source}/num_prompts"]
        found.append((prompts, line[key], error, int(samples)))
    if not found:
        return None
    total = sum(prompts for prompts, *_ in found)
    accuracy = sum(prompts * value for prompts, value, *_ in found) / total
    samples = min(samples for *_, samples in found)
    return {
        "accuracy": accuracy,
        **accuracy_interval(accuracy, int(total), found[0][2] if len(found) == 1 else None, samples),
        "num_prompts": int(total),
        "samples": samples,
    }


def accuracy_interval(accuracy: float, num_prompts: int, stderr: float | None = None, samples: int = 1) -> dict:
    """95 % Wilson interval of a mean over prompts as ``{"low", "high"}``.

    With several responses a prompt it is of as many effective responses as the standard error over prompts tells, no more than
    there are, and without a standard error of one a prompt.
    """
    count = float(num_prompts)
    if stderr and samples > 1:
        count *= accuracy * (1 - accuracy) / (stderr**2 * (num_prompts - 1))
        count = min(max(count, 1.0), num_prompts * samples)
    found = wilson(accuracy, count)
    return {"low": found.low, "high": found.high}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; the folder is not that of a run, or the run logged nothing.")
    return list(read_lines(path))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config_origin.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _seconds(folder: Path, steps: list[dict[str, Any]]) -> float:
    """Between the last start and the last event; where they are not there, the steps with what follows each."""
    path = folder / "events.jsonl"
    events = _lines(path) if path.exists() else []
    starts = [event["time"] for event in events if event.get("kind") == "start"]
    if starts and events[-1]["time"] > starts[-1]:
        return events[-1]["time"] - starts[-1]
    parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    return sum(line.get(part, 0.0) for line in steps for part in parts)


def _names(lines: list[dict[str, Any]], prefix: str) -> list[str]:
    return sorted({key.removeprefix(prefix) for line in lines for key in line if key.startswith(prefix)})


def _median(lines: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float | None:
    values = []
    for line in lines:
        try:
            values.append(figure(line))
        except (KeyError, ZeroDivisionError):  # a run without that stage, or a step without updates
            continue
    return statistics.median(values) if values else None


def _update_seconds(line: dict[str, Any]) -> float:
    return line["timing_s/update_actor"] + line.get("timing_s/update_critic", 0.0)


def _memory(steps: list[dict[str, Any]]) -> dict[str, float]:
    names = {"gpu_allocated": "perf/max_memory_allocated_gb", "gpu_reserved": "perf/max_memory_reserved_gb"}
    found = {name: max(line.get(key, 0.0) for line in steps) for name, key in names.items() if key in steps[-1]}
    if found:
        return found
    computer = [line["perf/cpu_memory_used_gb"] for line in steps if "perf/cpu_memory_used_gb" in line]
    return {"computer": max(computer)} if computer else {}


def shown(value: Any) -> Any:
    """Paths of one computer say nothing on another: their last part stays."""
    if isinstance(value, list):
        return [shown(part) for part in value]
    return f".../{Path(value).name}" if isinstance(value, str) and value.startswith(("/", "~")) else value
