"""``burnish demo``: a small model learns arithmetic while you watch, by the same code path as any other run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import burnish
from burnish.config import load_config
from burnish.trainer.main_ppo import Parts, RunSummary, run_ppo
from burnish.utils.console import console, error_console
from burnish.utils.errors import ConfigError

ACCURACY = "val-core/burnish/arithmetic/acc/mean@1"
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


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
class LiveView:
    """What the demo shows while it trains: the last steps, seconds per stage, and one response with its score."""

    total_steps: int
    num_rows: int = 8
    rows: list[dict[str, float]] = field(default_factory=list)
    sample: dict[str, Any] = field(default_factory=dict)
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    live: Live | None = None

    def __call__(self, report: Any) -> None:
        """A trainer callback."""
        now = time.perf_counter()
        if report.step == 0:
            self.accuracy_before = report.metrics.get(ACCURACY)
            self.started = now
            error_console.print(f"accuracy on held-out prompts before: {_percent(self.accuracy_before)}")
            return
        self.seconds = now - self.started
        self.accuracy_after = report.metrics.get(ACCURACY, self.accuracy_after)
        self.rows.append({"step": report.step, **report.metrics})
        self.sample = report.sample
        if self.live is not None:
            self.live.update(self.render())
        else:
            error_console.print(self._line())

    def _line(self) -> str:
        row = self.rows[-1]
        return (
            f"step {row['step']:>3.0f}/{self.total_steps}  reward {row.get('critic/score/mean', float('nan')):.3f}  "
            f"length {row['response_length/mean']:.1f}  {row['timing_s/step']:.2f} s"
        )

    def render(self) -> Group:
        """The whole view."""
        if not self.rows:
            return Group(Text("Loading the model and measuring its accuracy ..."))
        table = Table(title=f"step {self.rows[-1]['step']:.0f} of {self.total_steps}", title_justify="left")
        for heading in ("step", "reward", "accuracy", "length", "entropy", "grad norm", "seconds"):
            table.add_column(heading, justify="right")
        for row in self.rows[-self.num_rows :]:
            table.add_row(
                f"{row['step']:.0f}",
                f"{row.get('critic/score/mean', float('nan')):.3f}",
                _percent(row.get("reward/acc/mean", row.get("critic/score/mean"))),
                f"{row['response_length/mean']:.1f}",
                f"{row.get('actor/entropy', float('nan')):.3f}",
                f"{row.get('actor/grad_norm', float('nan')):.3f}",
                f"{row['timing_s/step']:.2f}",
            )
        last = self.rows[-1]
        stages = "  ".join(
            f"{name} {last[f'timing_s/{name}']:.2f}" for name in STAGES if last.get(f"timing_s/{name}", 0) > 0.005
        )
        sample = Text(f"{self.sample.get('prompt', '')}{self.sample.get('response', '')}")
        score = f"score {self.sample.get('score', float('nan')):.1f}, right is {self.sample.get('ground_truth')}"
        return Group(table, Text(f"seconds per stage: {stages}"), Panel(sample, title=score, title_align="left"))


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
                "trainer.logger": ["file"],
            },
            *overrides,
        ]
    )
    view = LiveView(total_steps=config.trainer.total_training_steps or steps)
    error_console.print(
        f"A model of a million parameters learns arithmetic by {config.algorithm.adv_estimator.upper()}."
    )
    if as_json or not console.is_terminal:
        summary = run_ppo(config, parts=Parts(callbacks=(view,)), quiet=True)
    else:
        with Live(view.render(), console=console, refresh_per_second=4) as view.live:
            summary = run_ppo(config, parts=Parts(callbacks=(view,)), quiet=True)
    _report(view, summary, as_json)
    return summary.status


def _report(view: LiveView, summary: RunSummary, as_json: bool) -> None:
    steps = len(view.rows)
    out = error_console if as_json else console
    if summary.interrupted:
        out.print(summary.ending, soft_wrap=True)
    if steps:
        per_step = sum(row["timing_s/step"] for row in view.rows) / steps
        out.print(f"{steps} steps in {view.seconds:.0f} s, {per_step:.2f} s a step.")
    after = "not measured after" if view.accuracy_after is None else f"{_percent(view.accuracy_after)} after"
    out.print(
        f"Accuracy on held-out prompts (greedy): {_percent(view.accuracy_before)} before, {after}.", soft_wrap=True
    )
    out.print(f"The run's files are in {summary.run_dir}", soft_wrap=True)
    if as_json:
        result = {
            "accuracy_before": view.accuracy_before,
            "accuracy_after": view.accuracy_after,
            "steps": steps,
            "seconds": round(view.seconds, 2),
            "run_dir": summary.run_dir,
        }
        console.print(json.dumps(result), markup=False, soft_wrap=True)
