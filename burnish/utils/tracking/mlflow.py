"""Metrics on MLflow."""

import importlib.util
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.utils import env
from burnish.utils.tracking.base import LOGGERS, PACKAGES, TABLE, RunInfo, table_rows
from burnish.utils.tracking.service import ServiceLogger

PACKAGES["mlflow"] = ("mlflow", "mlflow")
# Of a request (MLflow's REST API).
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM, _LONGEST_NAME = 1000, 100, 6000, 250
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")


@LOGGERS.register("mlflow")
class MlflowLogger(ServiceLogger):
    """A run of the experiment ``trainer.project_name`` on the server of ``MLFLOW_TRACKING_URI``, in ``mlflow.db`` or
    ``mlruns/`` of the run's folder where that is not set.

    MLflow's names have no @: ``val-core/gsm8k/acc/mean@8`` is ``val-core/gsm8k/acc/mean_at_8`` there.
    """

    name = "mlflow"

    def _start(self, info: RunInfo, run_id: str | None) -> str:
        from mlflow.tracking import MlflowClient

        # Its context of an active run belongs to a thread; the client does not need one.
        uri = env.get("MLFLOW_TRACKING_URI") or _local_uri(info.run_dir)
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        experiment = self._client.get_experiment_by_name(info.project_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(info.project_name)
        self._run_id = self._client.create_run(experiment_id, run_name=info.experiment_name).info.run_id
        self._send_params(info.plain_config())
        return self._run_id

    def _send_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(_name(key), str(value)[:_LONGEST_PARAM])
            for key, value in _flat(config)
            if str(value) not in ("", "None")
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def _send(self, data: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(key), float(value), now, step) for key, value in data.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def _send_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = [dict(zip(TABLE, row, strict=True)) for row in table_rows(rows)]
        self._client.log_dict(self._run_id, {"generations": table}, f"val_generations/step_{step}.json")

    def finish(self) -> None:
        """Ends the run there."""
        self._client.set_terminated(self._run_id)


def _local_uri(run_dir: Path) -> str:
    """A database where the package for one is there, else plain files, which the smaller packages know alone."""
    if importlib.util.find_spec("sqlalchemy") is not None:
        return f"sqlite:///{run_dir.absolute()}/mlflow.db"
    # MLflow asks for this word before it writes files.
    env.set_all({"MLFLOW_ALLOW_FILE_STORE": "true"})
    return (run_dir.absolute() / "mlruns").as_uri()


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key.replace("@", "_at_"))[:_LONGEST_NAME]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration with their whole names."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
