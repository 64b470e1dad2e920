"""Seconds per step of the demo, stage by stage, and tokens per second of its rollout and its update.

    python -m benchmarks.demo --json
    python -m benchmarks.demo --peer hf       # the rollout beside transformers' generate, turn by turn, and their ratio

The demo's recipe on the tiny model: 64 prompts x 8 responses a step, GRPO, one update. A repeat is a run of its own in the same
process: its first step warms up and is not counted. A figure is the median over the repeats of the mean over their steps.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import burnish
from burnish.utils import env

TINY_MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny_model"
STAGES = ("gen", "reward", "adv", "update_actor", "update_weights", "step")


def machine() -> str:
    """Processor, cores that may be used, and the version of torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {env.num_cpus()} cores, {device}, torch {torch.__version__}"


def run_once(steps: int, rollout: str = "native") -> dict[str, float]:
    """Mean seconds of each stage, and tokens per second, over ``steps`` steps after one that warms up."""
    with tempfile.TemporaryDirectory() as folder:
        run = burnish.train(
            model=str(TINY_MODEL / "model"),
            dataset=str(TINY_MODEL / "data" / "train.jsonl"),
            recipe="demo",
            actor_rollout_ref={"rollout": {"name": rollout}},
            trainer={
                "total_training_steps": steps + 1,
                "default_local_dir": folder,
                "logger": ["file"],
                "save_freq": -1,
            },
        )
    counted = run.history[1:]
    seconds = {stage: statistics.fmean(metrics[f"timing_s/{stage}"] for metrics in counted) for stage in STAGES}
    response_tokens = statistics.fmean(
        metrics["response_length/mean"] * metrics["training/num_rows"] for metrics in counted
    )
    tokens = statistics.fmean(metrics["perf/total_num_tokens"] for metrics in counted)
    return {f"{stage}_s": value for stage, value in seconds.items()} | {
        "rollout_tokens_per_s": response_tokens / seconds["gen"],
        "update_tokens_per_s": tokens / seconds["update_actor"],
    }


def measure(repeats: int, steps: int, peer: str | None = None) -> dict[str, Any]:
    """The machine, and of each figure the median, the least and the greatest over the repeats."""
    runs = []
    for _ in range(repeats):
        run = run_once(steps)
        if peer is not None:
            theirs = run_once(steps, peer)["rollout_tokens_per_s"]
            run[f"{peer}_rollout_tokens_per_s"] = theirs
            run[f"rollout_over_{peer}"] = run["rollout_tokens_per_s"] / theirs
        runs.append(run)
    figures = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in ((name, [run[name] for run in runs]) for name in runs[0])
    }
    return {"machine": machine(), "repeats": repeats, "steps": steps, "figures": figures}


def main() -> None:
    """Measures and prints a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a repeat that count")
    parser.add_argument("--peer", metavar="ROLLOUT", help="another rollout engine to measure beside the native one")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.repeats, args.steps, args.peer)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}; median of {args.repeats} x {args.steps} steps (least, greatest)")
    for name, figure in result["figures"].items():
        print(f"{name:24} {figure['median']:10.4g} ({figure['min']:.4g}, {figure['max']:.4g})")


if __name__ == "__main__":
    main()
