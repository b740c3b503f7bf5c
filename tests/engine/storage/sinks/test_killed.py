"""A run that is killed at any moment leaves behind what can be read."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from trainprobe.engine.storage.dumps import read, read_log

ROOT = Path(__file__).resolve().parents[4]
ENDLESS = """
import sys
import numpy as np
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.writer import open_writer
writer = open_writer(plan_for(sys.argv[1], sinks=("jsonl", "dump", "csv", "tensorboard"), task="tensor"), Place())
print("ready", flush=True)
for step in range(100_000):
    step_data = small_step(step, task="tensor")
    for number, value in enumerate(step_data.values):
        value.tensor = f"value.{number}"
        writer.submit_tensor(step, value.tensor, np.full((500, 300), step, np.float32))
    writer.submit(step_data)
"""


def events(path: Path) -> int:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return sum(1 for _ in EventFileLoader(str(path)).Load())


@pytest.mark.parametrize("moment", range(5))
def test_everything_on_disk_can_be_read_after_kill_9(moment, tmp_path):
    out = tmp_path / "out"
    run = [sys.executable, "-c", ENDLESS, str(out)]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(moment).uniform(0.2, 0.7))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)

    steps = [step_data.step for step_data in read_log(out)]
    assert steps == list(range(len(steps)))
    dumped = sorted(out.glob("step*/rank0"))
    assert len(dumped) in {len(steps), len(steps) - 1}
    for rank in dumped:
        assert len(read(rank).calls) == 5
        for path in rank.glob("*.json"):
            json.loads(path.read_text())
        with safe_open(rank / "tensors.safetensors", "np") as file:
            assert (file.get_tensor("value.4") == read(rank).step).all()
    rows = (out / "rank0/metrics.csv").read_text().splitlines()
    assert all(row.count(",") >= 10 for row in rows[:-1])
    assert next(events(path) for path in out.glob("tensorboard/rank0/*")) >= len(steps) - 1
