"""MLflow: a run of an experiment, in the store that `MLFLOW_TRACKING_URI` names or MLflow's own default."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from fedguild.runs.tracking import Begun, TrackedRun
from fedguild.runs.tracking.points import ROUND_SECONDS

_MOST_METRICS = 1000
"""Metrics in one request, by MLflow's own limit; of parameters it takes a tenth."""
_LONGEST_PARAMETER = 500
"""Characters, which every store of MLflow takes."""


class MLflow:
    """Logs rounds as the steps of an MLflow run. The project is an experiment; group and tags are tags of the run."""

    PACKAGE: ClassVar[str] = "mlflow"
    EXTRA: ClassVar[str] = "mlflow"
    TAKES_BACK: ClassVar[bool] = False

    _client: Any
    _id: str

    def begin(self, run: TrackedRun) -> Begun:
        """Creates a run, or reopens the one with the given id."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run.id:
            self._id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return Begun(run.id, self._last_round())
        experiment = self._client.get_experiment_by_name(run.project)
        identity = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        tags = {**({"group": run.group} if run.group else {}), **dict.fromkeys(run.tags, "true")}
        self._id = self._client.create_run(identity, run_name=run.name, tags=tags).info.run_id
        settings = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in run.flat_settings().items()]
        size = _MOST_METRICS // 10
        for start in range(0, len(settings), size):
            self._client.log_batch(self._id, params=settings[start : start + size])
        return Begun(self._id)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _last_round(self) -> int:
        """Returns the last round whose values are all in the store; -1 if none."""
        complete = [metric.step for metric in self._client.get_metric_history(self._id, ROUND_SECONDS)]
        begun = bool(self._client.get_run(self._id).data.metrics)
        return max(complete, default=0 if begun else -1)


TRACKER = MLflow
