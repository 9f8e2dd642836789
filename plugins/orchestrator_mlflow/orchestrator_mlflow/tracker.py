"""A run of MLflow for every run: settings as parameters, figures as metrics, the record as an artifact."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from orchestrator import FinishedRun, Tracker, UserError

_STATUS = {"ok": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_LONGEST = 6000
"""Characters of a parameter that every one of MLflow's stores takes."""
_AT_ONCE = 100
"""Parameters that MLflow takes in one call."""


class MLflowTracker(Tracker):
    uri: str | None = None
    """Of the tracking server or store, such as sqlite:///runs.db; null for what MLFLOW_TRACKING_URI says, or MLflow's
    own default."""
    experiment: str = "orchestrator"
    """Made where there is none of that name."""

    def check(self) -> None:
        if find_spec("mlflow") is None:
            raise UserError("the tracker mlflow needs MLflow; pip install 'orchestrator[mlflow]'")

    def log(self, run: FinishedRun) -> str:
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.entities import Metric, Param

        uri = self.uri or get_tracking_uri()
        with _others_kept_out(uri):
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        made = client.create_run(experiment, run_name=run.run_id).info.run_id
        now = time.time_ns() // 1_000_000
        params = [Param(name, value[:_LONGEST]) for name, value in run.settings.items()]
        for start in range(0, len(params), _AT_ONCE):
            client.log_batch(made, params=params[start : start + _AT_ONCE])
        client.log_batch(made, metrics=[Metric(name, float(value), now, 0) for name, value in run.numbers.items()])
        client.log_artifact(made, str(run.record))
        client.set_terminated(made, _STATUS[run.status])
        return f"run {made} of the experiment {self.experiment}"


@contextmanager
def _others_kept_out(uri: str) -> Iterator[None]:
    """MLflow makes the tables of a new file and an experiment without asking whether another run of the sweep does too;
    all but one would fail."""
    if not uri.startswith("sqlite"):
        yield
        return
    with FileLock(lock_path()):
        yield


def lock_path() -> Path:
    return Path(tempfile.gettempdir()) / f"orchestrator-mlflow-{os.getuid()}.lock"
