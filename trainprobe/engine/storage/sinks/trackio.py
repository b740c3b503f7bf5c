"""Trackio: the run that the script has open, as `trainprobe/…`, or one of its own; findings are alerts.

`TRACKIO_DIR` decides where its database lies; `trackio show` shows it, and `trackio sync` sends it to a Space. Rank 0 sends, on
a thread of its own. `trackio.init` would end the run of the script, so the run is made without it. In the script's run a second
object of the client logs: the script's own counts its steps on as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import SendsNothing, alert_text, client_of
from trainprobe.engine.storage.service_thread import ServiceSink

_LEVELS = {"error": "ERROR", "warning": "WARN"}


class TrackioService:
    """Logs the numbers of each step. run: that of the client. levels: its levels of alerts. folder: of the run log.

    prefix: of their names.
    """

    def __init__(self, run: Any, levels: Any, folder: Path, prefix: str) -> None:
        self._run, self._levels, self._folder, self._prefix = run, levels, folder, prefix

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log({self._prefix + name: number for name, number in numbers.items()}, step=step)

    def tell(self, finding: Finding) -> None:
        """Raise an alert for a warning or an error."""
        if finding.severity in _LEVELS:
            level, text = self._levels[_LEVELS[finding.severity]], alert_text(finding, self._folder)
            self._run.alert(f"trainprobe: {finding.rule}, step {finding.step}", text, level, finding.step)

    def end(self) -> None:
        """End the run."""
        self._run.finish()


def open(folder: Path, plan: Plan, place: Place) -> ServiceSink | SendsNothing:
    """Join the run of the script or begin one, on rank 0. Raises MissingExtra without the client."""
    client, running = client_of("trackio", "trackio", "trackio.context_vars")
    if place.rank:
        return SendsNothing()
    theirs = running.current_run.get()
    if theirs and plan.join_runs and theirs.url is None:  # on this machine
        run = client.Run(None, theirs.project, None, theirs.name, theirs.id, theirs.group)
        run.config = {}  # that of the script stays
        return ServiceSink("trackio", TrackioService(run, client.AlertLevel, folder, "trainprobe/"))
    project = theirs.project if theirs else "trainprobe"
    run = client.Run(None, project, None, f"trainprobe {folder.name}", group=theirs.name if theirs else None)
    return ServiceSink("trackio", TrackioService(run, client.AlertLevel, folder, ""))
