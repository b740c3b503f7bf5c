"""Prometheus: the numbers of the last step at an address that a server scrapes, `http://127.0.0.1:9464/metrics`.

`TRAINPROBE_PROMETHEUS=HOST:PORT` names another one. One process of a machine serves: local rank 0. Gauges are
`trainprobe_value{rank, series}` and `trainprobe_step{rank}`, and `trainprobe_findings_total{rank, rule, severity}` counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import FewNumbers, SendsNothing, client_of, sends
from trainprobe.errors import PlanError

_ADDRESS = "127.0.0.1:9464"


class PrometheusSink:
    """Serves the numbers of the last step."""

    def __init__(self, client: Any, rank: int) -> None:
        self._few = FewNumbers("prometheus")
        host, _, port = os.environ.get("TRAINPROBE_PROMETHEUS", _ADDRESS).rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise PlanError(f"TRAINPROBE_PROMETHEUS={host}:{port} is no HOST:PORT, for example {_ADDRESS}")
        registry = client.CollectorRegistry()
        self._rank = str(rank)
        self._gauges: dict[str, Any] = {}  # to look one up takes longer than to set it
        self._value = client.Gauge("trainprobe_value", "a number of the last step", ["rank", "series"], registry=registry)
        self._step = client.Gauge("trainprobe_step", "the last step", ["rank"], registry=registry)
        self._found = client.Counter("trainprobe_findings", "findings", ["rank", "rule", "severity"], registry=registry)
        self._server: Any  # None once it is closed
        self._server, self._thread = client.start_http_server(int(port), addr=host or "127.0.0.1", registry=registry)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.server_port

    def write(self, step_data: StepData) -> None:
        """Show the numbers of a step."""
        for name, number in self._few.of(step_data).items():
            if (gauge := self._gauges.get(name)) is None:
                gauge = self._gauges[name] = self._value.labels(self._rank, name)
            gauge.set(number)
        self._step.labels(self._rank).set(step_data.step)

    def findings(self, findings: Sequence[Finding]) -> None:
        """Count findings."""
        for finding in findings:
            self._found.labels(self._rank, finding.rule, finding.severity).inc()

    def warnings_made(self) -> Sequence[Finding]:
        """Return what the sink leaves out."""
        return self._few.warnings_made()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def open(folder: Path, plan: Plan, place: Place) -> PrometheusSink | SendsNothing:
    """Begin to serve on local rank 0. Raises MissingExtra without the client, OSError where the port is taken."""
    (client,) = client_of("prometheus", "prometheus_client")
    return PrometheusSink(client, place.rank) if sends(place) else SendsNothing()
