"""Weights & Biases: the run that the script has open, as `trainprobe/…`, or one of its own; findings are alerts.

The client's own environment variables decide where to: `WANDB_PROJECT`, `WANDB_MODE=offline`. Rank 0 sends, on a
thread of its own, so a step does not wait for the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import SendsNothing, alert_text, client_of, remember_run, remembered_run
from trainprobe.engine.storage.service_thread import ServiceSink

_LEVELS = {"error": "ERROR", "warning": "WARN"}


class WandbService:
    """Logs the numbers of each step. run: that of the client. folder: of the run log."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.run, self._folder = run, folder

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self.run.log(dict(numbers), step=step)

    def tell(self, finding: Finding) -> None:
        """Raise an alert for a warning or an error."""
        if finding.severity in _LEVELS:
            title, text = f"trainprobe: {finding.rule}, step {finding.step}", alert_text(finding, self._folder)
            self.run.alert(title, text, level=_LEVELS[finding.severity])

    def end(self) -> None:
        """End the run."""
        self.run.finish()


class SharedRun(WandbService):
    """Adds the numbers of a step to each row of the script's run, and a step of their own to draw them over.

    A row that is ended here would count the steps of the script on, and the client drops what comes for an earlier step. So a
    row gets the first step that comes while it is open; those until the script ends it are in the run log alone.
    """

    def __init__(self, run: Any, folder: Path) -> None:
        super().__init__(run, folder)
        self._row = -1  # of the script, that has numbers of ours
        run.define_metric("trainprobe/step", hidden=True)
        run.define_metric("trainprobe/*", step_metric="trainprobe/step")

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, unless the open row has some."""
        if self.run.step != self._row:
            named = {f"trainprobe/{name}": number for name, number in numbers.items()}
            self.run.log({"trainprobe/step": step, **named}, commit=False)
            self._row = self.run.step  # read behind: if a row ended meanwhile, one goes without, and none mixes two steps

    def end(self) -> None:
        """Leave the run to the script."""


def open(folder: Path, plan: Plan, place: Place) -> ServiceSink | SendsNothing:
    """Join the run of the script or begin one, on rank 0. Raises MissingExtra without the client."""
    (client,) = client_of("wandb", "wandb")
    if place.rank:
        return SendsNothing()
    theirs = client.run
    group = (theirs.group or theirs.id) if theirs else os.environ.get("WANDB_RUN_GROUP")
    where = {"project": theirs.project, "entity": theirs.entity} if theirs else {}
    if theirs and plan.join_runs:
        service: WandbService = SharedRun(theirs, folder)
    else:
        service = WandbService(_begin(client, folder, f"trainprobe {folder.name}", {**where, "group": group}), folder)
    remember_run(folder, "wandb", project=service.run.project, entity=where.get("entity"), group=group or service.run.id)
    return ServiceSink("wandb", service)


def upload(page: Path, folder: Path) -> str:
    """Log the page of the run in `folder` as an artifact, by a run of its own in the same group; return where it is.

    A run that has ended is not begun again: offline, its history would be written over. Raises MissingExtra and FormatError.
    """
    (client,) = client_of("wandb", "wandb")
    run = _begin(client, folder, f"page of {folder.name}", remembered_run(folder, "wandb"))
    artifact = client.Artifact(f"trainprobe-{re.sub(r'[^0-9A-Za-z_.-]', '-', folder.name)}", type="trainprobe-page")
    artifact.add_file(str(page), name=page.name)
    run.log_artifact(artifact)
    run.finish()
    return f"artifact {artifact.name.partition(':')[0]} of the project {run.project}"


def _begin(client: Any, folder: Path, name: str, where: Mapping[str, str | None]) -> Any:
    return client.init(
        project=where.get("project") or os.environ.get("WANDB_PROJECT") or "trainprobe",
        entity=where.get("entity"),
        group=where.get("group"),
        name=name,
        job_type="trainprobe",
        dir=str(folder),
        reinit="create_new",
        settings=client.Settings(console="off", silent=True, x_disable_stats=True),
    )
