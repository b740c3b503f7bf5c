"""MLflow: the numbers of each step as metrics of the active run, or of one of its own; findings are tags.

The client's own environment variables decide where to: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`. Rank 0 sends, on a
thread of the client, so a step does not wait for the network. Metrics are named `trainprobe/…`: those of the script stay as
they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import FewNumbers, SendsNothing, client_of

_REFUSED = re.compile(r"[^\w\-. :/]")  # characters that a name of a metric must not have
_MOST = 1000  # metrics that one request may hold


class MlflowSink:
    """Logs the numbers of each step. own: whether the run is to be ended here."""

    def __init__(self, client: Any, metric: Any, run: str, own: bool) -> None:
        self._client: Any = client  # None once it is closed
        self._metric, self._run, self._own = metric, run, own
        self._few = FewNumbers("mlflow", _MOST // 2)
        self._findings = 0
        self._sent: list[Any] = []

    def write(self, step_data: StepData) -> None:
        """Log the numbers of a step."""
        now = int(time.time() * 1000)
        metrics = [
            self._metric("trainprobe/" + _REFUSED.sub("_", name), number, now, step_data.step)
            for name, number in self._few.of(step_data).items()
        ]
        self._sent = [one for one in self._sent if not one._future.done()] if len(self._sent) > 100 else self._sent
        self._sent.append(self._client.log_batch(self._run, metrics, synchronous=False))

    def findings(self, findings: Sequence[Finding]) -> None:
        """Keep each finding as a tag."""
        for finding in findings:
            name = f"trainprobe.finding.{self._findings}"
            self._findings += 1
            self._client.set_tag(self._run, name, f"{finding.severity} {finding.rule}, step {finding.step}: {finding.message}")

    def warnings_made(self) -> Sequence[Finding]:
        """Return what the sink leaves out."""
        return self._few.warnings_made()

    def close(self) -> None:
        """Wait for what was sent, and end the run if it is this sink's own."""
        if self._client is not None:
            for one in self._sent:
                one.wait()
            if self._own:
                self._client.set_terminated(self._run)
            self._client = None


def open(folder: Path, plan: Plan, place: Place) -> MlflowSink | SendsNothing:
    """Take the active run or begin one, on rank 0. Raises MissingExtra without the client."""
    mlflow, fluent = client_of("mlflow", "mlflow", "mlflow.tracking.fluent")
    if place.rank:
        return SendsNothing()
    active = mlflow.active_run()
    client = mlflow.MlflowClient()
    if active is not None:
        return MlflowSink(client, mlflow.entities.Metric, active.info.run_id, False)
    experiment = fluent._get_experiment_id()
    run = client.create_run(experiment, run_name=f"trainprobe {folder.name}")
    return MlflowSink(client, mlflow.entities.Metric, run.info.run_id, True)
