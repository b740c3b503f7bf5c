"""OpenTelemetry: the numbers of each step as gauges, and findings as log records, to the collector that the SDK is told.

The SDK's own environment variables decide where to: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_METRIC_EXPORT_INTERVAL`. Gauges are `trainprobe.<group>.<statistic>` with the module or parameter as the attribute `name`,
and the attributes `slot` and `rank`. One process of a machine exports: local rank 0. What is exported is the last step of its
interval. The SDK refuses numbers that are not finite: they are absent, and `trainprobe.nonfinite` says how many there are. It
exports on threads of its own, so a step does not wait for the network.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.service_clients import FewNumbers, SendsNothing, client_of, sends

_LAUNCHERS = {"slurm.job.id": "SLURM_JOB_ID", "torchelastic.run.id": "TORCHELASTIC_RUN_ID", "k8s.pod.name": "POD_NAME"}
_SEVERITIES = {"error": (17, "ERROR"), "warning": (13, "WARN"), "info": (9, "INFO")}  # numbers of the log data model
_MODULES = ("metrics", "metrics.export", "resources", "_logs", "_logs.export")


class OtlpSink:
    """Shows the last step to the SDK's reader, and emits log records. meters, logs: their providers."""

    def __init__(self, meters: Any, logs: Any, api: tuple[Any, Any], place: Place) -> None:
        self._meters, self._logs, (self._metrics_api, self._logs_api), self._rank = meters, logs, api, place.rank
        self._open = [meters, logs]
        self._few = FewNumbers("otlp")
        self._last: Mapping[str, float] = {}  # tag → number of the last step
        of_all = {name: (f"trainprobe.{name}", {"rank": place.rank}) for name in ("step", "nonfinite")}
        self._places: Mapping[str, tuple[str, dict[str, Any]]] = of_all  # tag → gauge, attributes
        self._gauges: set[str] = set()

    def write(self, step_data: StepData) -> None:
        """Let the gauges be those of a step."""
        numbers = self._few.of(step_data)
        strange = sum(not isfinite(number) for number in numbers.values())
        self._last = {**numbers, "step": float(step_data.step), "nonfinite": float(strange)}
        if not (new := numbers.keys() - self._places.keys()):
            return
        self._places = {**self._places, **{tag: self._place(tag) for tag in new}}
        meter = self._meters.get_meter("trainprobe")
        for name in {gauge for gauge, _ in self._places.values()} - self._gauges:
            self._gauges.add(name)
            meter.create_observable_gauge(name, [self._shows(name)])

    def _place(self, tag: str) -> tuple[str, dict[str, Any]]:
        group, _, rest = tag.partition("/")
        name, slot, last = (rest, "", "value") if group == "scalars" else ("", *rest.split("/"))[-3:]
        if group != "scalars" and not name:  # of a feature, which has no statistic
            name, slot = slot, ""
        return f"trainprobe.{group}.{last}", {"name": name, "rank": self._rank, **({"slot": slot} if slot else {})}

    def _shows(self, name: str) -> Callable[[Any], list[Any]]:
        """Return what tells the reader the numbers of a gauge, which asks as it exports: once in many steps, perhaps."""

        def shown(_: Any) -> list[Any]:
            last = self._last
            places = [(last.get(tag, nan), about) for tag, (gauge, about) in self._places.items() if gauge == name]
            return [self._metrics_api.Observation(number, about) for number, about in places if isfinite(number)]

        return shown

    def findings(self, findings: Sequence[Finding]) -> None:
        """Emit a log record for each finding."""
        for finding in findings:
            number, text = _SEVERITIES[finding.severity]
            about = {"rule": finding.rule, "step": finding.step, "rank": self._rank, "next": finding.next}
            record = self._logs_api.LogRecord(
                timestamp=time.time_ns(),
                severity_number=self._logs_api.SeverityNumber(number),
                severity_text=text,
                body=finding.message,
                attributes={key: value for key, value in about.items() if value is not None},
            )
            self._logs.get_logger("trainprobe").emit(record)

    def warnings_made(self) -> Sequence[Finding]:
        """Return what the sink leaves out."""
        return self._few.warnings_made()

    def close(self) -> None:
        """Export what is left."""
        for provider in self._open:
            provider.shutdown()
        self._open = []


def open(folder: Path, plan: Plan, place: Place) -> OtlpSink | SendsNothing:
    """Make providers of metrics and logs on local rank 0, for this sink alone. Raises MissingExtra without the SDK."""
    grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
    home = f"opentelemetry.exporter.otlp.proto.{'grpc' if grpc else 'http'}"
    of_metrics, of_logs = client_of("otlp", f"{home}.metric_exporter", f"{home}._log_exporter")
    sdk = client_of("otlp", *(f"opentelemetry.sdk.{name}" for name in _MODULES))
    api = tuple(client_of("otlp", "opentelemetry.metrics", "opentelemetry._logs"))
    if not sends(place):
        return SendsNothing()
    metrics, readers, resources, logs, processors = sdk
    told = {name: os.environ[variable] for name, variable in _LAUNCHERS.items() if os.environ.get(variable)}
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # a pod's host has its name
        told.setdefault("k8s.pod.name", os.environ.get("HOSTNAME") or socket.gethostname())
    about = {"service.name": "trainprobe", "host.name": socket.gethostname(), "trainprobe.run": folder.name, **told}
    resource = resources.Resource.create(about)
    meters = metrics.MeterProvider(
        [readers.PeriodicExportingMetricReader(of_metrics.OTLPMetricExporter())],
        resource=resource,
        exemplar_filter=metrics.AlwaysOffExemplarFilter(),  # it would draw random numbers for each number
    )
    records = logs.LoggerProvider(resource=resource)
    records.add_log_record_processor(processors.BatchLogRecordProcessor(of_logs.OTLPLogExporter()))
    return OtlpSink(meters, records, api, place)
