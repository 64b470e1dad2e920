"""Metrics on Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.utils.tracking.base import LOGGERS, PACKAGES, TABLE, RunInfo, table_rows
from burnish.utils.tracking.service import GENERATIONS, ServiceLogger

STEP = "training/global_step"

PACKAGES["wandb"] = ("wandb", "wandb")


@LOGGERS.register("wandb")
class WandbLogger(ServiceLogger):
    """A run on wandb, with the trainer's step as the axis of every curve; its own environment variables (``WANDB_MODE``,
    ``WANDB_ENTITY``, ...) act as everywhere."""

    name = "wandb"

    def _start(self, info: RunInfo, run_id: str | None) -> str:
        self._run = self._module.init(
            project=info.project_name,
            name=info.experiment_name,
            config=info.plain_config(),
            dir=str(info.run_dir),
            id=run_id,
            resume="allow",
        )
        # wandb's own count of calls only goes up: a validation of the step that a run goes on from would be refused.
        self._run.define_metric("*", step_metric=STEP)
        return str(self._run.id)

    def _send(self, data: Mapping[str, float], step: int) -> None:
        self._run.log({**data, STEP: step})

    def _send_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._module.Table(columns=list(TABLE), data=table_rows(rows), allow_mixed_types=True)
        # The metrics of the same step come after it.
        self._run.log({GENERATIONS: table, STEP: step}, commit=False)

    def finish(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()
