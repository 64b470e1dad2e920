"""Training as one Python call: ``burnish.train(model=..., dataset=..., reward_fn=...)``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from burnish.config import load_config
from burnish.trainer.main_ppo import Parts, run_ppo

Rows = Iterable[Mapping[str, Any]]


@dataclass(kw_only=True)
class Run:
    """A finished run.

    Attributes:
        run_dir: where its metrics, configuration and checkpoints are.
        history: one dictionary of metrics per logged step, in order.
        interrupted: Ctrl-C ended it.
    """

    run_dir: Path
    history: list[dict[str, float]]
    interrupted: bool

    @property
    def metrics(self) -> dict[str, float]:
        """The last step's metrics."""
        return self.history[-1] if self.history else {}

    def curve(self, name: str) -> list[float]:
        """The values of one metric over the steps that have it."""
        return [metrics[name] for metrics in self.history if name in metrics]


def train(
    model: str,
    dataset: str | list[str] | Rows,
    reward_fn: Callable[..., Any] | None = None,
    *,
    val_dataset: str | list[str] | Rows | None = None,
    recipe: str | None = None,
    callbacks: tuple[Callable[[Any], None], ...] = (),
    **overrides: Any,
) -> Run:
    """Trains ``model`` on ``dataset`` with the rewards of ``reward_fn``; what ``python -m burnish.trainer.main_ppo`` does.

    Args:
        model: a Hugging Face model folder or hub id.
        dataset: files, or rows: ``{"prompt": text or messages, "ground_truth": ..., ...}``.
        reward_fn: ``(data_source, solution_str, ground_truth, extra_info) -> score``; default: by ``data_source``.
        val_dataset: likewise; without it there is no validation.
        recipe: a recipe of `burnish/config/recipes` to start from.
        callbacks: called with a `StepReport` after every step.
        **overrides: configuration, nested as in YAML (``trainer={"total_training_steps": 20}``) or by dotted key
            (``**{"actor_rollout_ref.rollout.n": 8}``).

    Raises:
        ConfigError, DataError: before anything heavy starts.
    """
    arguments = [f"recipe={recipe}"] if recipe else []
    arguments.append(_override("actor_rollout_ref.model.path", model))
    history: list[dict[str, float]] = []
    parts = Parts(
        reward_fn=reward_fn,
        callbacks=(lambda report: history.append(report.metrics), *callbacks),
    )
    for key, source in (("train", dataset), ("val", val_dataset)):
        if source is None or isinstance(source, str) or _is_list_of_paths(source):
            arguments.append(_override(f"data.{key}_files", source))
        else:
            arguments.append(_override(f"data.{key}_files", None))
            setattr(parts, f"{key}_rows", [_row(row) for row in cast(Rows, source)])
    arguments += [_override(key, value) for key, value in _flatten(overrides)]
    config = load_config(arguments, train_rows_given=parts.train_rows is not None)
    summary = run_ppo(config, parts=parts, quiet=True)
    return Run(run_dir=Path(summary.run_dir), history=history, interrupted=summary.interrupted)


def _is_list_of_paths(source: Any) -> bool:
    return isinstance(source, (list, tuple)) and all(isinstance(item, str) for item in source)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the dataset's form: a top-level ``ground_truth`` moves under ``reward_model``."""
    row = dict(row)
    if "ground_truth" in row and "reward_model" not in row:
        row["reward_model"] = {"style": "rule", "ground_truth": row.pop("ground_truth")}
    row.setdefault("data_source", "custom")
    return row


def _flatten(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _override(key: str, value: Any) -> str:
    """``key=value`` in Hydra's grammar."""
    if value is None or isinstance(value, (bool, int, float, list, tuple, dict)):
        return f"{key}={json.dumps(value)}"
    return f"{key}={json.dumps(str(value))}"
