"""Weights & Biases: a run of its own beside that of the script, in its project and group; findings are alerts.

The client's own environment variables decide where to: `WANDB_PROJECT`, `WANDB_MODE=offline`. Rank 0 sends. The client hands
what is logged to a process of its own, so a step does not wait for the network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import FewNumbers, SendsNothing, client_of

_LEVELS = {"error": "ERROR", "warning": "WARN"}


class WandbSink:
    """Logs the numbers of each step. run: that of the client."""

    def __init__(self, run: Any) -> None:
        self._run: Any = run  # None once it is closed
        self._few = FewNumbers("wandb")

    def write(self, step_data: StepData) -> None:
        """Log the numbers of a step."""
        self._run.log(self._few.of(step_data), step=step_data.step)

    def findings(self, findings: Sequence[Finding]) -> None:
        """Raise an alert for each warning and error."""
        for finding in findings:
            if finding.severity in _LEVELS:
                text = "\n".join(filter(None, [finding.message, finding.next]))
                self._run.alert(f"trainprobe: {finding.rule}, step {finding.step}", text, level=_LEVELS[finding.severity])

    def warnings_made(self) -> Sequence[Finding]:
        """Return what the sink leaves out."""
        return self._few.warnings_made()

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def open(folder: Path, plan: Plan, place: Place) -> WandbSink | SendsNothing:
    """Begin a run on rank 0. Raises MissingExtra without the client."""
    (client,) = client_of("wandb", "wandb")
    if place.rank:
        return SendsNothing()
    theirs = client.run
    run = client.init(
        project=theirs.project if theirs else os.environ.get("WANDB_PROJECT") or "trainprobe",
        entity=theirs.entity if theirs else None,
        group=(theirs.group or theirs.id) if theirs else os.environ.get("WANDB_RUN_GROUP"),
        name=f"trainprobe {folder.name}",
        job_type="trainprobe",
        dir=str(folder),
        reinit="create_new",
        settings=client.Settings(console="off", silent=True, x_disable_stats=True),
    )
    return WandbSink(run)
