"""Trackio gets the series of the run log through its real client, without a network; a kill loses the last window at most."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.foreign.test_sinks_of_clients import STEPS, train
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.engine.storage.tagged_numbers import numbers_of

ENDLESS = """
import pathlib, sys, time
import torch
import trainprobe
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
with trainprobe.watch(model, optimizer, output=sys.argv[1], sinks=["parquet", "trackio"], console=False) as probe:
    while True:
        with probe.step():
            loss = model(torch.randn(6, 4)).square().mean()
            probe.note("loss", loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(time.monotonic(), flush=True)
        time.sleep(0.02)
"""
WINDOW = 2.0  # seconds: half of one in the client, and what writing takes


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio.sqlite_storage as module

    for name, loaded in list(sys.modules.items()):  # each module of the client keeps the folder that it found first
        if name.partition(".")[0] == "trackio" and hasattr(loaded, "TRACKIO_DIR"):
            monkeypatch.setattr(loaded, "TRACKIO_DIR", tmp_path / "trackio")
    return module.SQLiteStorage


def series(storage, project: str, run: str) -> dict[int, dict[str, float]]:
    """Return step → what the client kept of it."""
    rows = storage.get_logs(project, run)
    assert len(rows) == len({row["step"] for row in rows})
    return {row["step"]: {name: float(x) for name, x in row.items() if name not in ("step", "timestamp")} for row in rows}


def test_trackio_gets_the_series_in_a_run_of_its_own_and_that_of_the_script_goes_on(tmp_path, storage):
    import trackio

    trackio.init(project="script", name="theirs", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    mine = {"inside": lambda probe, step: trackio.log({"mine": step}), "join_runs": False}
    wanted = train(tmp_path / "run", "trackio", nan=True, **mine)
    trackio.log({"mine": 99})
    trackio.finish()
    assert series(storage, "script", "theirs") == {step: {"mine": x} for step, x in enumerate([*range(STEPS), 99])}
    got = series(storage, "script", "trainprobe run")
    assert got == {step: pytest.approx(numbers, nan_ok=True) for step, numbers in enumerate(wanted)}
    assert math.isnan(got[3]["scalars/loss"])
    alerts = [alert for alert in storage.get_alerts("script", "trainprobe run") if "nonfinite, step 3" in alert["title"]]
    assert [alert["level"] for alert in alerts] == ["error"] and "trainprobe why " in alerts[0]["text"]


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_training_leaves_all_but_the_last_window(tmp_path, storage, seed):
    out = tmp_path / "run"
    there = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(out)], stdout=subprocess.PIPE, text=True, env=there) as run:
        try:
            ended = [float(run.stdout.readline()) for _ in range(50)]
            time.sleep(random.Random(seed).uniform(0, 1.5))
        finally:
            run.kill()
        killed = time.monotonic()
        ended += [float(line) for line in run.stdout.read().split("\n")[:-1]]
    assert run.returncode == -signal.SIGKILL
    got = series(storage, "trainprobe", "trainprobe run")
    assert sorted(got) == list(range(len(got))) and len(got) > 3
    wanted = {step.step: dict(numbers_of(step)) for step in read_log(Path(out))}
    both = got.keys() & wanted.keys()
    assert len(both) > 3 and {step: got[step] for step in both} == {step: pytest.approx(wanted[step]) for step in both}
    slowest = max(
        after - before for before, after in pairwise(ended)
    )  # a busy machine holds up the client as it does the steps
    assert len(got) == len(ended) or killed - ended[len(got)] < WINDOW + 3 * slowest, (len(got), len(ended), slowest)
