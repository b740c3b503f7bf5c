"""What a script tells W&B, MLflow and Trackio becomes scalars of the step, and the client gets what it would get without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.foreign.test_sink_trackio import storage as storage
from tests.test_told import STEPS, told, train
from trainprobe.engine.core.records import TOLD
from trainprobe.monitor.scalar_logs import wandb as reader


def test_wandb_gets_the_same_with_and_without_us(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    def logged(folder: Path, output: Path | None) -> None:
        run = wandb.init(project="script", dir=str(folder), reinit="finish_previous")
        log = wandb.log  # a method that was bound before the probe was there
        train(
            output,
            lambda step, loss: log({"loss": loss, "nested": {"lr": 0.1}, "text": "x"}, commit=False),
            lambda step, loss: run.log(data={"reward": step}),
        )
        run.finish()

    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    logged(tmp_path / "with", tmp_path / "run")
    logged(tmp_path / "without", None)
    wandb.teardown()  # its process writes the rest
    ours, theirs = (sorted(reader.read(reader.find(tmp_path / name)[0])) for name in ("with", "without"))
    assert ours == theirs and len(ours) == 3 * STEPS
    wanted: list[dict[str, float]] = [{} for _ in range(STEPS)]
    for step, name, number in ours:
        wanted[step][f"{TOLD}{name}"] = number
    assert told(tmp_path / "run") == wanted


def test_mlflow_gets_the_same_with_and_without_us(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    def logged(output: Path | None) -> dict[str, list[tuple[int, float]]]:
        with mlflow.start_run() as run:
            train(
                output,
                lambda step, loss: mlflow.log_metric("loss", loss.item(), step=step),
                lambda step, loss: mlflow.log_metrics({"reward": step, "lr": 0.5}, step=step),
            )
        client = mlflow.MlflowClient()
        names = client.get_run(run.info.run_id).data.metrics
        return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}

    ours, theirs = logged(tmp_path / "run"), logged(None)
    assert ours == theirs and sorted(ours) == ["loss", "lr", "reward"]
    assert told(tmp_path / "run") == [
        {f"{TOLD}{name}": values[step][1] for name, values in ours.items()} for step in range(STEPS)
    ]


def test_trackio_gets_the_same_with_and_without_us_and_nothing_is_taken_where_it_is_off(tmp_path, storage):
    import trackio

    def logged(name: str, output: Path | None, **plan: Any) -> list[torch.Tensor]:
        trackio.init(project="script", name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)
        weights = train(
            output,
            lambda step, loss: trackio.log({"loss": loss.item(), "nested": {"lr": 0.1}, "text": "x"}),
            lambda step, loss: trackio.log({"reward": float(step)}),
            **plan,
        )
        trackio.finish()
        return weights

    runs = {
        "without": logged("without", None),
        "with": logged("with", tmp_path / "with"),
        "off": logged("off", tmp_path / "off", told=False),
    }
    without, ours, off = ([_but_for_time(row) for row in storage.get_logs("script", name)] for name in runs)
    assert without == ours == off and len(ours) == 2 * STEPS
    assert [row["reward"] for row in ours[1::2]] == [step[f"{TOLD}reward"] for step in told(tmp_path / "with")]
    assert [row["loss"] for row in ours[::2]] == [step[f"{TOLD}loss"] for step in told(tmp_path / "with")]
    assert told(tmp_path / "off") == [{}] * STEPS
    for name in ("with", "off"):
        assert all(map(torch.equal, runs["without"], runs[name]))


def _but_for_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "timestamp"}
