"""Logs that the clients of other tools write without a server are read as they were told."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from trainprobe.cli import main
from trainprobe.monitor.run_folder import read_frames

RUN = """
import os, sys, wandb
run = wandb.init(project="probe", mode="offline", dir=sys.argv[1], settings=wandb.Settings(console="off"))
for step in range(300):
    loss = float("nan") if step == 250 else 2.0 - step / 300
    run.log({"loss": loss, "nested": {"lr": 0.1}, "note": "x" * 2000, "table": [1, 2]}, step=2 * step)
    if step == 280 and sys.argv[2] == "killed":
        import time; time.sleep(3)
        os.kill(os.getpid(), 9)
run.finish()
"""


def wandb_run(folder: Path, how: str) -> None:
    subprocess.run([sys.executable, "-c", RUN, str(folder), how], check=how == "whole", capture_output=True, timeout=120)


def test_a_run_of_wandb_is_read_offline(tmp_path, capsys):
    wandb_run(tmp_path, "whole")
    got = {frame.step: dict(frame.scalars) for frame in read_frames(tmp_path)}
    assert list(got) == list(range(0, 600, 2))
    for step, row in got.items():
        assert row["nested/lr"] == 0.1
        assert math.isnan(row["loss"]) if step == 500 else row["loss"] == 2.0 - step / 600
    assert main(["judge", str(tmp_path)]) == 1
    assert "the first NaN of step 500 is in loss" in capsys.readouterr().out


def test_a_killed_run_of_wandb_is_read_up_to_its_end(tmp_path):
    wandb_run(tmp_path, "killed")
    steps = [frame.step for frame in read_frames(tmp_path)]
    assert steps == list(range(0, 2 * len(steps), 2)) and len(steps) > 200


def test_a_damaged_file_of_wandb_is_told(tmp_path, capsys):
    wandb_run(tmp_path, "whole")
    (file,) = {path.resolve() for path in tmp_path.rglob("run-*.wandb")}
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)
    main(["judge", str(file)])
    assert "is damaged at byte" in "".join(capsys.readouterr())


def test_the_csv_of_keras_is_read_by_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    said = model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[keras.callbacks.CSVLogger(tmp_path / "log.csv")])
    got = [dict(frame.scalars)["loss"] for frame in read_frames(tmp_path)]
    assert got == pytest.approx(said.history["loss"])
