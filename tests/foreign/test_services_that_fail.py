"""A training that is killed, and a service that does not answer: what is lost is told, no step waits. The clients are real."""

from __future__ import annotations

import json
import random
import runpy
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.storage import service_thread
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.sinks import mlflow
from trainprobe.engine.storage.tagged_numbers import numbers_of
from trainprobe.monitor.run_folder import find_logs

# another package of that environment is named `benchmarks`, too
kill_one = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/kills.py"))["kill_one"]
LOSS = "scalars/loss"
LATE = 3.0  # seconds: those of the run log, and what a machine that is busy with other tests takes
RUN = {"info": {"run_id": "a", "run_uuid": "a", "experiment_id": "0", "status": "RUNNING", "artifact_uri": "a"}, "data": {}}


@contextmanager
def server(silent: tuple[str, ...], seen: list[tuple[str, bytes]], refused: tuple[str, ...] = ()) -> Generator[str]:
    """Listen on loopback. Requests to what is silent are read and get no answer until the end, those to what is refused 503."""
    over = threading.Event()

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))))
            if self.path.endswith(silent):
                over.wait(120)
            body = b"" if self.path.startswith("/v1/") else json.dumps({"run": RUN}).encode()
            self.send_response(503 if self.path.endswith(refused or "?") else 200)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        over.set()
        listening.shutdown()


def of_wandb(folder: Path, _: list[tuple[str, bytes]]) -> dict[int, float]:
    """Return step → loss, once the client's own process has written what it was given."""
    from trainprobe.monitor.scalar_logs import wandb as reader

    before: dict[int, float] = {-1: 0.0}
    while True:
        read = {step: x for log in reader.find(folder) for step, name, x in reader.read(log) if name == LOSS}
        if read == before:
            return read
        before = read
        time.sleep(2)


def of_mlflow(folder: Path, _: list[tuple[str, bytes]]) -> dict[int, float]:
    (file,) = (folder.parent / "mlruns").rglob("loss")
    rows = [line.split() for line in file.read_text().split("\n")[:-1]]
    return {int(step): float(x) for _, x, step in rows}


def of_otlp(_: Path, seen: list[tuple[str, bytes]]) -> dict[int, float]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    losses: dict[int, float] = {}
    for path, body in seen:
        if path == "/v1/metrics":
            (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
            metrics = {metric.name: metric.gauge.data_points for scope in resource.scope_metrics for metric in scope.metrics}
            if "trainprobe.step" in metrics:
                losses[int(metrics["trainprobe.step"][0].as_double)] = metrics["trainprobe.scalars.value"][0].as_double
    return losses


@pytest.mark.parametrize(("sink", "read"), [("wandb", of_wandb), ("mlflow", of_mlflow), ("otlp", of_otlp)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_training_leaves_a_service_what_it_sent(tmp_path, monkeypatch, sink, read, seed):
    seen: list[tuple[str, bytes]] = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())

    def kept(folder: Path) -> set[int]:
        got = read(folder, seen)
        assert len(got) > 3, got
        (log,) = find_logs(folder)
        wanted = {step.step: dict(numbers_of(step))[LOSS] for step in read_log(folder)}
        both = got.keys() & wanted.keys()
        assert len(both) > 3 and log
        assert {step: got[step] for step in both} == {step: pytest.approx(wanted[step], rel=1e-6) for step in both}
        return set(range(max(got) + 1)) if sink == "otlp" else set(got)

    with server((), seen) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        waits = mlflow.WINDOW if sink == "mlflow" else 0.0
        killed = kill_one(0.05, 2, f"parquet,{sink}", False, waits + random.Random(seed).uniform(1.5, 5), kept)
    print(sink, killed)
    assert killed.kept and killed.seconds < waits + LATE


@pytest.mark.parametrize("sink", ["mlflow", "otlp"])
def test_what_is_sent_again_later_draws_no_random_number_of_the_training(tmp_path, monkeypatch, sink):
    """How long a client waits in between is random."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    seen = list[tuple[str, bytes]]()
    with server((), seen, refused=("log-batch", "/v1/metrics")) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        random.seed(1)
        before = random.getstate()
        with trainprobe.watch(model, optimizer, output=tmp_path, sinks=["parquet", sink], console=False) as probe:
            for _ in range(2):
                with probe.step():
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
            until = time.monotonic() + 30
            while sum(path.endswith(("log-batch", "/v1/metrics")) for path, _ in seen) < 2:
                assert time.monotonic() < until, seen
                time.sleep(0.1)
    assert random.getstate() == before


@pytest.mark.parametrize("sink", ["mlflow", "otlp"])
def test_a_service_that_does_not_answer_holds_up_no_step_and_not_the_run_log(tmp_path, monkeypatch, sink):
    steps, seen, took = 24, list[tuple[str, bytes]](), list[float]()
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setattr(service_thread, "WAITING", 4)
    monkeypatch.setattr(mlflow, "SERIES", 500)  # that series are left out is a finding, which waits, too
    monkeypatch.setattr(service_thread, "CLOSE_SECONDS", 1.0)
    with server(("log-batch", "/v1/metrics", "/v1/logs"), seen) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with trainprobe.watch(model, optimizer, output=tmp_path, sinks=["parquet", sink], console=False) as probe:
            for _ in range(steps):
                began = time.monotonic()
                with probe.step():
                    loss = model(torch.randn(6, 4)).square().mean()
                    probe.note("loss", loss)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                took.append(time.monotonic() - began)
                time.sleep(0.02)
            probe.flush()
            asked = any(path.endswith(("log-batch", "/v1/metrics")) for path, _ in seen)
            kept = len(list(read_log(tmp_path)))
            closing = time.monotonic()
        closed = time.monotonic() - closing
    assert asked and kept == steps  # while the service is silent
    assert max(took[1:]) < 2 and closed < 20, (took, closed)
    told = [finding.message for finding in probe.findings if finding.rule == "writer"]
    if sink == "mlflow":
        lost = steps - 5  # one is on its way, four wait
        assert any(f"the writer 'mlflow' lost {lost} of {steps} steps, 5 to {steps - 1}" in text for text in told), told
        assert any(
            "the client of 'mlflow' did not end within 1 s: 5 steps and findings got no answer" in text for text in told
        ), told
