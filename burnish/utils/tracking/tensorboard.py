"""Metrics as TensorBoard's event files."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.utils import env, local_paths
from burnish.utils.tracking.base import LOGGERS, PACKAGES, TABLE, RunInfo, optional, table_rows
from burnish.utils.tracking.service import GENERATIONS

PACKAGES["tensorboard"] = ("torch.utils.tensorboard", "tensorboard")


@LOGGERS.register("tensorboard")
class TensorboardLogger:
    """Event files in ``tensorboard/`` of the run's folder, or where the environment variable ``TENSORBOARD_DIR`` says.

    A run that goes on from a checkpoint, or starts anew, takes back what the files hold of later steps.
    """

    def __init__(self, info: RunInfo) -> None:
        module = optional("tensorboard")
        chosen = env.get("TENSORBOARD_DIR")
        folder = str(local_paths.named("TENSORBOARD_DIR", chosen) if chosen else info.run_dir / "tensorboard")
        has_earlier = os.path.isdir(folder) and bool(os.listdir(folder))
        first = info.resumed_step + 1 if info.resumed_step else 0
        self._writer = module.SummaryWriter(folder, purge_step=first if has_earlier else None)
        text = json.dumps(info.plain_config(), indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", global_step=info.resumed_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Adds a scalar a metric."""
        for key, value in data.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    # A run that goes on takes it back.
    log_partial = log

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Adds the responses as one text."""
        self._writer.add_text(GENERATIONS, "\n\n---\n\n".join(map(_as_markdown, table_rows(rows))), step)

    def finish(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _as_markdown(row: Sequence[Any]) -> str:
    """The cells below their names; indented, so that nothing in a text is taken for markup."""
    return "\n\n".join(
        f"**{column}**\n\n" + "\n".join(f"    {line}" for line in str(cell).split("\n"))
        for column, cell in zip(TABLE, row, strict=True)
        if cell is not None
    )
