"""``burnish demo``: a small model learns arithmetic while you watch, by the same code path as any other run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import burnish
from burnish.config import load_config
from burnish.trainer.main_ppo import Parts, RunSummary, run_ppo
from burnish.trainer.ppo.stages import StepReport
from burnish.utils.console import console, error_console
from burnish.utils.errors import ConfigError

ACCURACY = "val-core/burnish/arithmetic/acc/mean@1"


def tiny_model_folder() -> Path:
    """``examples/tiny_model`` of the source tree.

    Raises:
        ConfigError: burnish was installed without its source tree.
    """
    folder = Path(burnish.__file__).resolve().parents[1] / "examples" / "tiny_model"
    if not (folder / "model" / "config.json").is_file():
        raise ConfigError(
            f"The demo's model is not at {folder}: it comes with the source tree. Get the source and run `make demo` there."
        )
    return folder


@dataclass
class Watch:
    """What the demo tells at the end: accuracy before and after, steps and seconds; with ``--json`` lines on the way."""

    tells_steps: bool
    num_steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    step_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def __call__(self, report: StepReport) -> None:
        """A trainer callback."""
        metrics, now = report.metrics, time.perf_counter()
        if report.step == 0:
            self.accuracy_before, self.started = metrics.get(ACCURACY), now
            if self.tells_steps:
                error_console.print(f"accuracy on held-out prompts before: {_percent(self.accuracy_before)}")
            return
        self.num_steps, self.seconds = self.num_steps + 1, now - self.started
        self.step_seconds += metrics["timing_s/step"]
        self.accuracy_after = metrics.get(ACCURACY, self.accuracy_after)
        if self.tells_steps:
            error_console.print(
                f"step {report.step:>3}/{report.total_steps}  reward {metrics.get('critic/score/mean', float('nan')):.3f}  "
                f"length {metrics['response_length/mean']:.1f}  {metrics['timing_s/step']:.2f} s"
            )


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.1f} %"


def run_demo(overrides: list[str], *, steps: int, seed: int, as_json: bool) -> int:
    """Trains, shows, and reports accuracy on held-out prompts before and after; returns the exit status."""
    folder = tiny_model_folder()
    run_dir = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S-%f}"
    config = load_config(
        [
            {
                "recipe": "demo",
                "actor_rollout_ref.model.path": folder / "model",
                "data.train_files": folder / "data" / "train.jsonl",
                "data.val_files": folder / "data" / "test.jsonl",
                "trainer.default_local_dir": run_dir,
                "trainer.total_training_steps": steps,
                "trainer.seed": seed,
                "trainer.logger": ["file"] if as_json else ["console", "file"],
            },
            *overrides,
        ]
    )
    watch = Watch(tells_steps=as_json)
    error_console.print(
        f"A model of a million parameters learns arithmetic by {config.algorithm.adv_estimator.upper()}."
    )
    summary = run_ppo(config, parts=Parts(callbacks=(watch,)), quiet=True)
    _report(watch, summary, as_json)
    return summary.status


def _report(watch: Watch, summary: RunSummary, as_json: bool) -> None:
    out = error_console if as_json else console
    if summary.interrupted:
        out.print(summary.ending, soft_wrap=True)
    if watch.num_steps:
        per_step = watch.step_seconds / watch.num_steps
        out.print(f"{watch.num_steps} steps in {watch.seconds:.0f} s, {per_step:.2f} s a step.")
    after = "not measured after" if watch.accuracy_after is None else f"{_percent(watch.accuracy_after)} after"
    out.print(
        f"Accuracy on held-out prompts (greedy): {_percent(watch.accuracy_before)} before, {after}.", soft_wrap=True
    )
    out.print(f"The run's files are in {summary.run_dir}", soft_wrap=True)
    if as_json:
        result = {
            "accuracy_before": watch.accuracy_before,
            "accuracy_after": watch.accuracy_after,
            "steps": watch.num_steps,
            "seconds": round(watch.seconds, 2),
            "run_dir": summary.run_dir,
        }
        console.print(json.dumps(result), markup=False, soft_wrap=True)
