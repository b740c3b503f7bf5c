"""What it costs a step of the real GPT to send its numbers to a service, besides writing the run log: one JSON line a service.

    .venvs/foreign/bin/python -m benchmarks.sinks            # the environment of `make test-foreign` has the clients
    .venvs/foreign/bin/python -m benchmarks.sinks --service wandb --quick

Both trainings are watched under the default plan without the audit; one has the further sink. `ratio` is their CPU time,
interleaved as in `benchmarks.overhead`, until the client has all. A thousandth is less than the noise of such a ratio.
`share` is therefore the CPU time of the sink and its client alone, for steps of this training that are handed to it again,
over the CPU time of a step without the sink. `beside` is that of the client's own process, in milliseconds a step.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from copy import copy
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import orjson
import torch
import typer

import trainprobe
from benchmarks.interleaved import alternate, median_ratio
from benchmarks.models import SIZES, prepare
from benchmarks.monitor import DEFAULT
from benchmarks.overhead import Lockstep
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.log import read_log

SERVICES = {"prometheus": "prometheus", "otlp": "otlp", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"} | {
    "mlflow, files": "mlflow",
    "wandb, joined": "wandb",  # the script has a run open, and logs a number a step
}
BAR = 0.003
STEP, FASTER = 0.7, 1 / 7  # seconds of a step of the real GPT on a quiet machine; steps that need time are handed over faster
AGAIN, ASKED = 200, 20  # steps that are handed to the sink once more; those between two exports, or scrapes
EMPTY = queue.SimpleQueue[None]()
# takes what OpenTelemetry and MLflow send, in a process of its own, whose time is not counted
LISTENER = """
import http.server, json
RUN = {"info": {"run_id": "a", "run_uuid": "a", "experiment_id": "0", "status": "RUNNING", "artifact_uri": "a"}, "data": {}}
class Listener(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"" if self.path.startswith("/v1/") else json.dumps({"run": RUN}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def surroundings(service: str) -> Generator[Path]:
    """Give a folder to write to, and tell the clients to stay on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_bench_"))
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        address = f"http://127.0.0.1:{listener.stdout.readline().strip()}"
        os.environ |= {
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        os.environ |= {"TRACKIO_DIR": str(folder / "trackio"), "TRAINPROBE_PROMETHEUS": "127.0.0.1:0"}
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_METRIC_EXPORT_INTERVAL": "10000"}
        os.environ["MLFLOW_TRACKING_URI"] = (folder / "mlruns").as_uri() if service == "mlflow, files" else address
        if service == "wandb, joined":
            import_module("wandb").init(dir=folder)
        try:
            yield folder
        finally:
            listener.terminate()
            shutil.rmtree(folder, ignore_errors=True)


def sent(sink: Any) -> None:
    """Wait until the client was given all."""
    while not getattr(sink, "_waiting", EMPTY).empty():
        time.sleep(0.01)


def interleaved(service: str, folder: Path, pairs: int) -> dict[str, Any]:
    """Train with and without the sink, in turn."""
    with ExitStack() as stack:
        sides = list[Lockstep]()
        for name, sinks in (("without", ["parquet"]), ("with", ["parquet", SERVICES[service]])):
            side = Lockstep(prepare(SIZES["real"], "whole step"), 1)
            plan = {"level": "off", "monitor": DEFAULT, "sinks": sinks, "console": False}
            watching = trainprobe.watch(side.training.model, side.training.optimizer, output=folder / name, **plan)
            side.probe = stack.enter_context(watching)
            sides.append(side)
        off, on = sides
        sink = on.probe.writer.sinks[SERVICES[service]]
        offs, ons = alternate(off.run, on.run, lambda: (on.drain(), sent(sink)), pairs)
    cpu, wall = (median_ratio([getattr(c, k) for c in ons], [getattr(c, k) for c in offs]) for k in ("cpu", "wall"))
    return {
        "ratio": round(cpu.median, 4),
        "low": round(cpu.low, 4),
        "high": round(cpu.high, 4),
        "wall": round(wall.median, 4),
        "pairs": pairs,
        "step_cpu_ms": round(1e3 * median(c.cpu for c in offs), 1),
        "losses_equal": all(map(torch.equal, off.losses, on.losses)),
    }


def alone(service: str, folder: Path) -> dict[str, Any]:
    """Hand a recorded step to the sink again and again, until its client has ended; return CPU time in ms a step."""
    *_, recorded = read_log(folder / "without")
    (folder / "alone").mkdir()
    others = os.times().children_user + os.times().children_system
    module = import_module(f"trainprobe.engine.storage.sinks.{SERVICES[service]}")
    sink = module.open(folder / "alone", Plan(), Place(0, 1))
    rest = FASTER * STEP if service.startswith("mlflow") else 0.0  # it gathers steps for a time
    if rest:
        module.WINDOW *= FASTER
    theirs = import_module("wandb").run if service == "wandb, joined" else None
    sink.write(recorded)
    sent(sink)
    begun, of_script = time.process_time(), 0.0
    for step in range(1, AGAIN + 1):
        again = copy(recorded)  # with its layout, as steps of a training share theirs
        again.step = recorded.step + step
        sink.write(again)
        time.sleep(rest)
        if theirs is not None:
            sent(sink)
            before = time.thread_time()
            theirs.log({"loss": 1.0})
            of_script += time.thread_time() - before
        if step % ASKED == 0 and service == "otlp":
            sink._meters.force_flush()
        if step % ASKED == 0 and service == "prometheus":
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read()
    sent(sink)
    sink.close()
    took = time.process_time() - begun - of_script
    if SERVICES[service] == "wandb":
        import_module("wandb").teardown()  # its process ends, and its time is known
    others = os.times().children_user + os.times().children_system - others
    return {"sink_cpu_ms": round(1e3 * took / AGAIN, 3), "beside_ms": round(1e3 * others / AGAIN, 3)}


def main(
    service: Annotated[list[str] | None, typer.Option(help=", ".join(SERVICES))] = None,
    quick: Annotated[bool, typer.Option(help="5 pairs: a look, not a figure")] = False,
) -> None:
    """Print one JSON line for each service."""
    torch.set_num_threads(1)
    for name in service or SERVICES:
        with surroundings(name) as folder:
            figures = interleaved(name, folder, 5 if quick else 25) | alone(name, folder)
        share = figures["sink_cpu_ms"] / figures["step_cpu_ms"]
        line = {"figure": "sink", "service": name, **figures, "share": round(share, 5), "bar": BAR, "met": share <= BAR}
        print(orjson.dumps(line).decode(), flush=True)


if __name__ == "__main__":
    typer.run(main)
