"""Metrics on SwanLab."""

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.utils.tracking.base import LOGGERS, PACKAGES, TABLE, RunInfo, table_rows
from burnish.utils.tracking.service import GENERATIONS, ServiceLogger

PACKAGES["swanlab"] = ("swanlab", "swanlab")


@LOGGERS.register("swanlab")
class SwanlabLogger(ServiceLogger):
    """An experiment on SwanLab; ``SWANLAB_MODE`` (cloud, local, offline), ``SWANLAB_API_KEY`` and ``SWANLAB_LOG_DIR`` act as
    everywhere, and what is kept on this computer lies in ``swanlab/`` of the run's folder."""

    name = "swanlab"

    def _start(self, info: RunInfo, run_id: str | None) -> str:
        folder = info.run_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._module.init(
            project=info.project_name,
            experiment_name=info.experiment_name,
            config=info.plain_config(),
            logdir=str(folder),
            **({} if run_id is None else {"id": run_id, "resume": "allow"}),
        )
        public = getattr(self._run, "public", None)
        return str(getattr(self._run, "id", None) or getattr(public, "run_id", ""))

    def _send(self, data: Mapping[str, float], step: int) -> None:
        self._run.log(dict(data), step=step)

    def _send_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = [
            self._module.Text("\n\n".join(f"{column}: {cell}" for column, cell in zip(TABLE, row, strict=True)))
            for row in table_rows(rows)
        ]
        self._run.log({GENERATIONS: texts}, step=step)

    def finish(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()
