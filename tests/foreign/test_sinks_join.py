"""Sinks send to the run that the script's own logger has open, and the script's series are those of a run without us."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainprobe
from tests.foreign.test_sink_trackio import storage as storage
from tests.foreign.test_sinks_of_clients import same_random_state
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.tagged_numbers import numbers_of

STEPS = 6
PAUSE = 0.05  # seconds: what the thread of a sink takes for a step
PREFIX = "trainprobe/"
Row = dict[str, Any]


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def train(folder: Path | None, sink: str, log: Callable[[int], Any]) -> list[torch.Tensor]:
    """Train and log each step; where there is a folder, with the sink. Return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    plan = {"sinks": ["parquet", sink], "monitor": True, "audit": {"every": 2}, "console": False}
    with ExitStack() as stack:
        watched = trainprobe.watch(model, optimizer, plan, output=folder) if folder is not None else None
        probe = stack.enter_context(watched) if watched is not None else None
        for step in range(STEPS):
            with probe.step() if probe is not None else nullcontext():
                loss = model(torch.randn(6, 4)).square().mean() * (float("nan") if step == 4 else 1.0)
                if probe is not None:
                    probe.note("loss", loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            log(step)
            if probe is not None:
                _wait(probe, sink)
    return [p.detach().clone() for p in model.parameters()]


def _wait(probe: Any, sink: str) -> None:
    """Return once the thread of the sink has been given all steps so far, and has had time for the last."""
    probe.flush()
    while probe.writer.sinks[sink]._waiting.qsize():
        time.sleep(0.01)
    time.sleep(PAUSE)


def wanted(folder: Path) -> dict[int, dict[str, float]]:
    return {step.step: dict(numbers_of(step)) for step in read_log(folder)}


def rows_of_wandb(folder: Path) -> tuple[list[Row], list[str]]:
    """Return what each row of the only run holds, and titles of alerts."""
    from wandb.proto.wandb_internal_pb2 import Record

    from trainprobe.monitor.scalar_logs import wandb as reader

    ((log,),) = reader.find(folder)
    with log.open("rb") as file:
        records = [Record.FromString(record) for record in reader._records(file, log)]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return rows, [record.alert.title for record in records if record.HasField("alert")]


def of_script(rows: list[Row]) -> list[Row]:
    """Return what the script logged: without our columns, rows that hold nothing else, and clocks."""
    left = [{k: v for k, v in row.items() if not k.startswith(PREFIX) and k not in ("_timestamp", "_runtime")} for row in rows]
    return [row for row in left if set(row) - {"_step", "train/global_step", "trainer/global_step"}]


def check_ours(rows: list[Row], recorded: dict[int, dict[str, float]], least: int) -> None:
    """See that each row holds all numbers of one step, of later and later ones."""
    ours = [{k[len(PREFIX) :]: float(v) for k, v in row.items() if k.startswith(f"{PREFIX}")} for row in rows]
    ours = [row for row in ours if "step" in row]
    steps = [int(row.pop("step")) for row in ours]
    assert steps == sorted(set(steps)) and len(steps) >= least
    for step, row in zip(steps, ours, strict=True):
        theirs = {"findings", "grad_norm"}  # what the callbacks hand to the loggers
        assert {k: x for k, x in row.items() if k not in theirs} == pytest.approx(recorded[step], rel=1e-6, nan_ok=True)


STYLES: dict[str, Callable[[Any, int], Any]] = {
    "one row a step": lambda run, step: run.log({"loss": step}),
    "numbered, in two calls": lambda run, step: [run.log({name: step}, step=10 * step) for name in ("loss", "lr")],
    "a row in parts": lambda run, step: [run.log({"loss": step}, commit=False), run.log({"lr": step})],
    "every third": lambda run, step: None if step % 3 else run.log({"loss": step}),
}


@pytest.mark.parametrize("style", STYLES)
def test_wandb_has_the_series_in_the_rows_of_the_script(tmp_path, offline, style):
    import wandb

    weights: dict[str, list[torch.Tensor]] = {}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        run = wandb.init(project="script", dir=str(tmp_path / name), reinit="finish_previous")
        with same_random_state():
            output = tmp_path / "run" if name == "with" else None
            weights[name] = train(output, "wandb", lambda step, run=run: STYLES[style](run, step))
        assert run is wandb.run
        run.log({"behind": 1})
        run.finish()
    wandb.teardown()  # its process writes the rest
    (rows, alerts), (plain, _) = (rows_of_wandb(tmp_path / name) for name in weights)
    assert all(torch.equal(a, b) or torch.isnan(a).any() for a, b in zip(*weights.values(), strict=True))
    assert of_script(rows) == of_script(plain)
    check_ours(rows, wanted(tmp_path / "run"), 2)
    assert "trainprobe: nonfinite, step 4" in alerts


def test_trackio_has_every_step_in_the_run_of_the_script(tmp_path, storage):
    import trackio

    weights = {}
    for name in ("with", "without"):
        trackio.init(project="script", name=name, embed=False, config={"lr": 0.01}, auto_log_cpu=False, auto_log_gpu=False)
        output = tmp_path / "run" if name == "with" else None
        weights[name] = train(output, "trackio", lambda step: None if step % 2 else trackio.log({"mine": step}))
        trackio.finish()
    assert storage.get_runs("script") and {run["name"] for run in storage.get_run_records("script")} == set(weights)
    rows = {name: storage.get_logs("script", name) for name in weights}
    mine = {name: [(row["step"], row["mine"]) for row in rows[name] if "mine" in row] for name in rows}
    assert mine["with"] == mine["without"] == [(0, 0), (1, 2), (2, 4)]
    ours = {row["step"]: row for row in rows["with"] if "mine" not in row}
    got = {step: {k[len(PREFIX) :]: float(x) for k, x in row.items() if k.startswith(PREFIX)} for step, row in ours.items()}
    assert got == {step: pytest.approx(numbers, nan_ok=True) for step, numbers in wanted(tmp_path / "run").items()}
    configs = [storage.get_run_config("script", name) for name in weights]
    assert configs[0].keys() == configs[1].keys() and configs[0]["lr"] == 0.01
    assert any("nonfinite, step 4" in alert["title"] for alert in storage.get_alerts("script", "with"))


def fit(folder: Path, logger: Any, sink: str | None) -> None:
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    plan = {"sinks": ["parquet", sink], "monitor": True, "console": False}
    callbacks = [] if sink is None else [ProbeCallback(plan, output=folder)]
    torch.manual_seed(9)
    trainer(callbacks, logger=logger, log_every_n_steps=2).fit(module(drop=0.0), loader())


def test_lightnings_mlflow_logger_has_the_series_in_its_run(tmp_path, offline):
    import mlflow
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(tracking_uri=(tmp_path / "mlruns").as_uri())
    fit(tmp_path / "run", logger, "mlflow")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.run_id == logger.run_id and run.info.status == "FINISHED"
    recorded = wanted(tmp_path / "run")
    history = logger.experiment.get_metric_history(logger.run_id, "trainprobe/scalars/loss")
    assert {m.step: m.value for m in history} == {s: pytest.approx(x["scalars/loss"]) for s, x in recorded.items()}


def test_lightnings_wandb_logger_has_the_series_in_its_run(tmp_path, offline):
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    (tmp_path / "wandb").mkdir()
    logger = WandbLogger(save_dir=str(tmp_path), project="script")
    fit(tmp_path / "run", logger, "wandb")
    wandb.finish()
    wandb.teardown()  # its process writes the rest
    rows, _ = rows_of_wandb(tmp_path)
    check_ours(rows, wanted(tmp_path / "run"), 1)  # the thread of the sink may be slower than these eight steps


@pytest.mark.parametrize("report_to", ["wandb", "trackio"])
def test_the_reporters_of_a_trainer_have_the_series_in_their_run(tmp_path, offline, storage, monkeypatch, report_to):
    from tests.integrations.transformers.small_trainer import train as train_a_trainer
    from trainprobe.integrations.transformers import ProbeCallback

    monkeypatch.chdir(tmp_path)
    probe = ProbeCallback({"sinks": ["parquet", report_to], "console": False}, output=tmp_path / "run")
    train_a_trainer(tmp_path / "out", [probe], report_to=[report_to], logging_strategy="steps", logging_steps=1)
    recorded = wanted(tmp_path / "run")
    if report_to == "wandb":
        import wandb

        wandb.finish()
        wandb.teardown()  # its process writes the rest
        rows, _ = rows_of_wandb(tmp_path)
        assert any("train/loss" in row for row in rows)
        check_ours(rows, recorded, 1)
        return
    (project,) = storage.get_projects()
    (run,) = storage.get_run_records(project)
    rows = storage.get_logs(project, run["name"])
    got = {row["step"]: row["trainprobe/scalars/loss"] for row in rows if "trainprobe/scalars/loss" in row}
    assert got == {step: pytest.approx(numbers["scalars/loss"]) for step, numbers in recorded.items()}
    assert any("train/loss" in row for row in rows)
