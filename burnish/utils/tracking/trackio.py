"""Metrics on Trackio."""

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.utils.tracking.base import LOGGERS, PACKAGES, TABLE, RunInfo, table_rows
from burnish.utils.tracking.service import GENERATIONS, ServiceLogger

PACKAGES["trackio"] = ("trackio", "trackio")


@LOGGERS.register("trackio")
class TrackioLogger(ServiceLogger):
    """A run of Trackio, on this computer, or where ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` say."""

    name = "trackio"

    def _start(self, info: RunInfo, run_id: str | None) -> str:
        self._run = self._module.init(
            project=info.project_name,
            name=run_id or info.experiment_name,
            config=info.plain_config(),
            resume="never" if run_id is None else "allow",
            embed=False,
        )
        return str(self._run.name)

    def _send(self, data: Mapping[str, float], step: int) -> None:
        self._run.log(dict(data), step=step)

    def _send_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._run.log({GENERATIONS: self._module.Table(columns=list(TABLE), data=table_rows(rows))}, step=step)

    def finish(self) -> None:
        """Waits until everything is written."""
        self._run.finish()
