"""Training as one Python call: ``burnish.train(model=..., dataset=..., reward_fn=...)``, and ``burnish.sft(...)`` for supervised
fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from burnish.config import load_config, load_sft_config
from burnish.trainer.main_ppo import Parts, run_ppo
from burnish.trainer.sft.main import run_sft
from burnish.utils.errors import ConfigError, DataError

Dataset = str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Mapping[str, Any]]


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
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward_fn: Callable[..., Any] | None = None,
    *,
    val_dataset: Dataset | None = None,
    recipe: str | None = None,
    callbacks: Sequence[Callable[[Any], None]] = (),
    **overrides: Any,
) -> Run:
    """Trains ``model`` on ``dataset`` with the rewards of ``reward_fn``; what ``python -m burnish.trainer.main_ppo`` does.

    Args:
        model: a Hugging Face model folder or hub id.
        dataset: a file, a list of files, or rows: ``{"prompt": text or messages, "ground_truth": ..., ...}``.
        reward_fn: ``(data_source, solution_str, ground_truth, extra_info) -> score``; default: by ``data_source``.
        val_dataset: likewise; without it there is no validation.
        recipe: a recipe of `burnish/config/recipes` to start from.
        callbacks: called with a `StepReport` after every step.
        **overrides: configuration, nested as in YAML (``trainer={"total_training_steps": 20}``) or by dotted key
            (``**{"actor_rollout_ref.rollout.n": 8}``). An estimator or a loss of your own may be given as the function.

    Raises:
        ConfigError, DataError: before anything heavy starts.
    """
    if reward_fn is not None and not callable(reward_fn):
        raise ConfigError(
            f"reward_fn={reward_fn!r}: a function is needed, (data_source, solution_str, ground_truth, ...)."
        )
    history: list[dict[str, float]] = []
    parts = Parts(reward_fn=reward_fn, callbacks=_callbacks(history, callbacks))
    train_files, parts.train_rows = _files_or_rows("dataset", dataset)
    val_files, parts.val_rows = _files_or_rows("val_dataset", val_dataset) if val_dataset is not None else (None, None)
    arguments = {
        "recipe": recipe,
        "actor_rollout_ref.model.path": model,
        "data.train_files": train_files,
        "data.val_files": val_files,
    }
    config = load_config([arguments, overrides], train_rows_given=parts.train_rows is not None)
    summary = run_ppo(config, parts=parts, quiet=True)
    return Run(run_dir=Path(summary.run_dir), history=history, interrupted=summary.interrupted)


def sft(
    model: str | os.PathLike[str],
    dataset: Dataset,
    *,
    val_dataset: Dataset | None = None,
    recipe: str | None = None,
    callbacks: Sequence[Callable[[Any], None]] = (),
    **overrides: Any,
) -> Run:
    """Teaches ``model`` the answers of the conversations in ``dataset``; what ``python -m burnish.trainer.sft`` does.

    Args:
        model: a Hugging Face model folder or hub id.
        dataset: a file, a list of files, or rows: ``{"messages": [{"role": "user", "content": ...}, ...]}``.
        val_dataset: likewise; without it there is no validation.
        recipe: a recipe of `burnish/config/recipes/sft` to start from.
        callbacks: called with a `StepReport` after every step.
        **overrides: configuration, nested as in YAML (``trainer={"total_epochs": 2}``) or by dotted key
            (``**{"optim.lr": 1e-5}``).

    Raises:
        ConfigError, DataError: before anything heavy starts.
    """
    history: list[dict[str, float]] = []
    parts = Parts(callbacks=_callbacks(history, callbacks))
    train_files, train_rows = _files_or_rows("dataset", dataset, as_row=_conversation)
    val_files, val_rows = None, None
    if val_dataset is not None:
        val_files, val_rows = _files_or_rows("val_dataset", val_dataset, as_row=_conversation)
    parts.train_rows, parts.val_rows = train_rows, val_rows
    arguments = {
        "recipe": recipe,
        "model.path": model,
        "data.train_files": train_files,
        "data.val_files": val_files,
    }
    config = load_sft_config([arguments, overrides], train_rows_given=train_rows is not None)
    summary = run_sft(config, parts=parts, quiet=True)
    return Run(run_dir=Path(summary.run_dir), history=history, interrupted=summary.interrupted)


def _callbacks(
    history: list[dict[str, float]], callbacks: Sequence[Callable[[Any], None]]
) -> tuple[Callable[[Any], None], ...]:
    """What is called after every step: what keeps its metrics, and the user's own."""
    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(f"callbacks: {callback!r} is not a function; one that takes a StepReport is needed.")
    return (lambda report: history.append(report.metrics), *callbacks)


def _files_or_rows(
    name: str, source: Dataset, as_row: Callable[[str, int, Any], dict[str, Any]] | None = None
) -> tuple[list[str] | None, list[dict[str, Any]] | None]:
    """What was given, as names of files or as rows."""
    if isinstance(source, str | os.PathLike):
        return [os.fspath(source)], None
    # Iterating over a table, as of pandas, gives the names of its columns.
    if isinstance(source, Mapping) or hasattr(source, "columns") or not isinstance(source, Iterable):
        raise DataError(
            f"{name} is {type(source).__name__}; a file, a list of files, or a list of rows is needed "
            f"(of a pandas table: df.to_dict('records'))."
        )
    items = list(source)
    if not items:
        raise DataError(f"{name} is empty.")
    if all(isinstance(item, str | os.PathLike) for item in items):
        return [os.fspath(cast(Any, item)) for item in items], None
    as_row = as_row or _row
    return None, [as_row(name, number, item) for number, item in enumerate(items)]


def _conversation(name: str, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{name}, row {number} is {type(row).__name__}, not a mapping such as {{'messages': [{{'role': 'user', ...}}, ...]}}."
        )
    return dict(row)


def _row(name: str, number: int, row: Any) -> dict[str, Any]:
    """A row in the dataset's form: a top-level ``ground_truth`` moves under ``reward_model``."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{name}, row {number} is {type(row).__name__}, not a mapping such as {{'prompt': ..., 'ground_truth': ...}}."
        )
    row = dict(row)
    if "ground_truth" in row and "reward_model" not in row:
        row["reward_model"] = {"style": "rule", "ground_truth": row.pop("ground_truth")}
    row.setdefault("data_source", "custom")
    return row
