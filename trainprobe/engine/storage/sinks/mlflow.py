"""MLflow: the numbers of each step as metrics of the active run, or of one of its own; findings are tags.

The client's own environment variables decide where to: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`. Rank 0 sends, on a
thread of its own, so a step does not wait for the network. Metrics are named `trainprobe/…`: those of the script stay as
they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.script_logs import script_log
from trainprobe.engine.storage.service_clients import SendsNothing, client_of, remember_run, remembered_run
from trainprobe.engine.storage.service_thread import ServiceSink

# its client takes 25 µs for each number, ten times what others do, and 2 ms for each request, which holds at most 1000
SERIES, WINDOW, MOST = 64, 5.0, 1000
OF_FILES = 32  # series that a store of files gets: for each number it lists its folders and opens a file, 60 µs
_FILES = re.compile(r"file:|(?!databricks|uc$)[^:]*$")  # addresses of such stores
_REFUSED = re.compile(r"[^\w\-. :/]")  # characters that a name of a metric must not have


class MlflowService:
    """Logs the numbers of each step. own: whether the run is to be ended here."""

    def __init__(self, client: Any, metric: Any, run: str, own: bool) -> None:
        self._client, self._metric, self._run, self._own = client, metric, run, own
        self._findings = 0
        self._waiting: list[Any] = []  # metrics
        self._sent = -WINDOW

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, with those of further steps in one request."""
        now = int(time.time() * 1000)
        self._waiting += [self._metric("trainprobe/" + _REFUSED.sub("_", name), x, now, step) for name, x in numbers.items()]
        if time.monotonic() - self._sent >= WINDOW or len(self._waiting) > MOST - SERIES:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting, self._sent = self._waiting, [], time.monotonic()
        self._client.log_batch(self._run, waiting)

    def tell(self, finding: Finding) -> None:
        """Keep a finding as a tag."""
        name = f"trainprobe.finding.{self._findings}"
        self._findings += 1
        self._client.set_tag(self._run, name, f"{finding.severity} {finding.rule}, step {finding.step}: {finding.message}")

    def end(self) -> None:
        """Log what waits, and end the run if it is this sink's own."""
        self._send()
        if self._own:
            self._client.set_terminated(self._run)


def open(folder: Path, plan: Plan, place: Place) -> ServiceSink | SendsNothing:
    """Take the active run or begin one, on rank 0. Raises MissingExtra without the client."""
    mlflow, fluent = client_of("mlflow", "mlflow", "mlflow.tracking.fluent")
    if place.rank:
        return SendsNothing()
    client, run = script_log("mlflow", plan) or (mlflow.MlflowClient(), None)
    if run is None and plan.join_runs and (active := mlflow.active_run()):
        run = active.info.run_id
    own = run is None
    if run is None:
        run = client.create_run(fluent._get_experiment_id(), run_name=f"trainprobe {folder.name}").info.run_id
    remember_run(folder, "mlflow", run=run)
    most = OF_FILES if _FILES.match(mlflow.get_tracking_uri()) else SERIES
    return ServiceSink("mlflow", MlflowService(client, mlflow.entities.Metric, run, own), most)


def upload(page: Path, folder: Path) -> str:
    """Log the page as an artifact of the run that `folder` was sent to, or of a run of its own; return where it is.

    Raises MissingExtra and FormatError.
    """
    mlflow, fluent = client_of("mlflow", "mlflow", "mlflow.tracking.fluent")
    client = mlflow.MlflowClient()
    sent = remembered_run(folder, "mlflow").get("run")
    run = sent or client.create_run(fluent._get_experiment_id(), run_name=f"page of {folder.name}").info.run_id
    client.log_artifact(run, str(page), "trainprobe")
    if sent is None:
        client.set_terminated(run)
    return f"artifact trainprobe/{page.name} of the run {run}"
