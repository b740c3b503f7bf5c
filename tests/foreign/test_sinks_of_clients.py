"""Services of other people are sent the series of the run log, through their real clients and without a network."""

from __future__ import annotations

import base64
import hashlib
import random
import shlex
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.service_clients import FewNumbers, SendsNothing
from trainprobe.engine.storage.tagged_numbers import numbers_of
from trainprobe.errors import PlanError, ProbeError

STEPS = 5


def train(folder: Path, *sinks: str, nan: bool = False, inside: Any = None, **fields: Any) -> list[dict[str, float]]:
    """Train with these sinks beside the run log and other fields of a plan; return the numbers of its steps by their tags."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    plan = {"sinks": ["parquet", *sinks], "console": False, **fields}
    with same_random_state(), trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(STEPS):
            with probe.step(step):
                loss = model(torch.randn(6, 4)).square().mean() * (float("nan") if nan and step == 3 else 1.0)
                probe.note("loss", loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if inside is not None:
                inside(probe, step)
    return [dict(numbers_of(step)) for step in read_log(folder)]


@contextmanager
def same_random_state() -> Generator[None]:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    yield
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index]


def test_wandb_gets_the_series_in_a_run_of_its_own_and_the_script_keeps_its_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    from trainprobe.monitor.scalar_logs import wandb as reader

    theirs = wandb.init(project="script", dir=str(tmp_path))
    wanted = train(tmp_path / "run", "wandb", inside=lambda probe, step: theirs.log({"mine": step}), join_runs=False)
    theirs.log({"mine": 99})
    theirs.finish()
    wandb.teardown()  # its process writes the rest
    logs = [list(reader.read(log)) for log in reader.find(tmp_path)]
    script, own = sorted(logs, key=len)
    assert script == [*((step, "mine", float(step)) for step in range(STEPS)), (STEPS, "mine", 99.0)]
    got: list[dict[str, float]] = [{} for _ in range(STEPS)]
    for step, name, number in own:
        got[step][name] = number
    assert [{n: pytest.approx(x) for n, x in step.items()} for step in wanted] == got


def test_an_alert_of_wandb_ends_with_the_command_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    from trainprobe.monitor.scalar_logs import wandb as reader

    train(tmp_path / "a run", "wandb", nan=True)
    wandb.teardown()  # its process writes the rest
    ((log,),) = reader.find(tmp_path)
    with log.open("rb") as file:
        alerts = [r.alert for r in map(Record.FromString, reader._records(file, log)) if r.HasField("alert")]
    (alert,) = [alert for alert in alerts if alert.title == "trainprobe: nonfinite, step 3"]
    *_, command = alert.text.splitlines()
    assert alert.level == "ERROR" and "the first NaN of step 3" in alert.text
    assert shlex.split(command) == ["trainprobe", "why", str(tmp_path / "a run")]
    assert main(shlex.split(command)[1:]) == 1  # there is a cause


def test_mlflow_gets_the_series_in_the_active_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    with mlflow.start_run() as run:
        wanted = train(tmp_path / "run", "mlflow", nan=True)
        mlflow.log_metric("mine", 1.0, step=3)
    client = mlflow.MlflowClient()
    for name in ("scalars/loss", "gradients/0.weight/grad/norm"):
        history = client.get_metric_history(run.info.run_id, f"trainprobe/{name}")
        assert sorted((m.step, m.value) for m in history) == [
            (step, pytest.approx(numbers[name], nan_ok=True)) for step, numbers in enumerate(wanted)
        ]
    told = client.get_run(run.info.run_id)
    assert told.data.metrics["mine"] == 1.0
    assert any("nonfinite, step 3" in text for name, text in told.data.tags.items() if name.startswith("trainprobe.finding"))


def test_prometheus_is_served_the_numbers_of_the_last_step_on_loopback(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINPROBE_PROMETHEUS", "127.0.0.1:0")
    pages: list[str] = []

    def scrape(probe: Any, step: int) -> None:
        probe.flush()
        sink = next(sink for name, sink in probe.writer.sinks.items() if name == "prometheus")
        pages.append(urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode())

    wanted = train(tmp_path, "prometheus", inside=scrape)
    for step, (page, numbers) in enumerate(zip(pages, wanted, strict=True)):
        shown = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
        assert shown['trainprobe_step{rank="0"}'] == step
        for name, number in numbers.items():
            assert shown[f'trainprobe_value{{rank="0",series="{name}"}}'] == pytest.approx(number)


@pytest.mark.parametrize("sink", ["wandb", "mlflow", "trackio", "otlp", "prometheus"])
def test_another_rank_of_the_machine_sends_nothing(tmp_path, sink):
    opened = import_module(f"trainprobe.engine.storage.sinks.{sink}").open(tmp_path, Plan(), Place(1, 2))
    assert isinstance(opened, SendsNothing) and not hasattr(opened, "write")


def test_an_address_that_is_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINPROBE_PROMETHEUS", "nowhere")
    with pytest.raises((PlanError, ProbeError), match="HOST:PORT"):
        train(tmp_path, "prometheus")


@pytest.mark.parametrize("nan", [False, True])
def test_otlp_exports_gauges_and_log_records_to_a_collector(tmp_path, monkeypatch, nan):
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    told: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "again")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "trainer-0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=nlp")
    wanted = train(tmp_path, "otlp", nan=nan)
    server.shutdown()
    points: dict[tuple[str, str], float] = {}
    for path, body in told:
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                about = {a.key: a.value.string_value for a in resource.resource.attributes}
                wanted_about = {
                    "slurm.job.id": "1234",
                    "torchelastic.run.id": "again",
                    "k8s.pod.name": "trainer-0",
                    "team": "nlp",
                }
                assert wanted_about.items() <= about.items() and about["trainprobe.run"] == tmp_path.name
                for metric in (m for scope in resource.scope_metrics for m in scope.metrics):
                    for point in metric.gauge.data_points:
                        name = {a.key: a.value.string_value for a in point.attributes}.get("name", "")
                        points[metric.name, name] = point.as_double or float(point.as_int)
    assert points["trainprobe.step", ""] == STEPS - 1
    finite = {name: number for name, number in wanted[-1].items() if np.isfinite(number)}
    assert points["trainprobe.nonfinite", ""] == len(wanted[-1]) - len(finite) == (len(wanted[-1]) - 1 if nan else 0)
    if nan:
        assert ("trainprobe.scalars.value", "loss") not in points
    else:
        assert points["trainprobe.scalars.value", "loss"] == pytest.approx(wanted[-1]["scalars/loss"])
        assert points["trainprobe.gradients.norm", "0.weight"] == pytest.approx(wanted[-1]["gradients/0.weight/grad/norm"])
    records = [
        record
        for path, body in told
        if path == "/v1/logs"
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]
    assert nan == any(r.severity_text == "ERROR" and "the first NaN of step 3" in r.body.string_value for r in records)


def test_of_many_series_scalars_and_norms_are_sent_and_the_rest_is_told(tmp_path):
    train(tmp_path)
    few = FewNumbers("wandb", most=10)
    for step in read_log(tmp_path):
        numbers = few.of(step)
        assert len(numbers) == 10 and "scalars/loss" in numbers
        assert all(name.startswith("scalars/") or name.endswith("/norm") for name in numbers)
    (warning,) = few.warnings_made()
    assert "sends 10 of" in warning.message and few.warnings_made() == []


def test_the_page_of_a_run_is_an_artifact_of_its_run_in_mlflow(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    train(tmp_path / "run", "mlflow", nan=True)
    page = tmp_path / "run" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--to", "mlflow"]) == 0
    (run,) = mlflow.search_runs(output_format="list")  # none besides that of the sink
    assert f"mlflow: artifact trainprobe/report.html of the run {run.info.run_id}" in capsys.readouterr().out
    assert run.data.metrics["trainprobe/scalars/loss"] and run.info.status == "FINISHED"
    there = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="trainprobe/report.html")
    assert Path(there).read_bytes() == page.read_bytes()


def test_the_page_of_a_run_is_an_artifact_of_wandb_in_the_group_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    from trainprobe.monitor.scalar_logs import wandb as reader

    theirs = wandb.init(project="script", dir=str(tmp_path))
    train(tmp_path / "a run", "wandb")
    theirs.finish()
    assert main(["report", str(tmp_path / "a run"), "--to", "wandb"]) == 0
    wandb.teardown()  # its process writes the rest
    begun, logged = [], []
    for (log,) in reader.find(tmp_path / "a run"):
        with log.open("rb") as file:
            records = [Record.FromString(record) for record in reader._records(file, log)]
        begun += [record.run for record in records if record.HasField("run")]
        logged += [record.artifact for record in records if record.HasField("artifact")]
    assert {(run.project, run.run_group) for run in begun} == {("script", theirs.id)}
    assert len({run.run_id for run in begun}) == 1  # the numbers are in that of the script
    (artifact,) = logged
    (entry,) = artifact.manifest.contents
    digest = base64.b64encode(hashlib.md5((tmp_path / "a run" / "report.html").read_bytes()).digest()).decode()
    assert (artifact.name, entry.path, entry.digest) == ("trainprobe-a-run", "report.html", digest)
