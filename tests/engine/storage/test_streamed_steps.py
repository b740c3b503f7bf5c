"""Steps too large to be held in memory, end to end: each value arrives, and a full disk or `kill -9` spoils none before it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 120.0  # s
CALLS = 8

TRAINING = """
import sys, torch, trainprobe
from tests.engine.storage.test_streamed_steps import one_step
with trainprobe.watch(torch.nn.Identity(), None, output=sys.argv[1], level="L1", task="tensor") as probe:
    for number in range(int(sys.argv[2])):
        with probe.step():
            one_step(number)
print([finding.message for finding in probe.findings])
"""
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 20, 24 << 20))\n" + TRAINING


def one_step(number: int) -> dict[str, torch.Tensor]:
    """Compute some 45 MB; return what the step has to save: values of 2 MB, of a few bytes, one too large to gather."""
    made = {"Torch.linspace.0": torch.linspace(number, number + 1, 3 << 20)}
    for i in range(CALLS):
        made[f"Torch.linspace.{i + 1}"] = torch.linspace(number, i, 1 << 19)
        made[f"Tensor.neg.{i}"] = made[f"Torch.linspace.{i + 1}"].neg()
        made[f"Torch.full.{i}"] = torch.full((i,), number, dtype=torch.uint8)
    return {f"{name}.forward.output": value for name, value in made.items()}


def start(code: str, folder: Path, steps: int, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TRAINPROBE_ON_ERROR": "continue",
        **variables,
    }
    command = [sys.executable, "-c", code, str(folder), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(code: str, folder: Path, steps: int, **variables: str) -> str:
    process = start(code, folder, steps, **variables)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def assert_holds(file: Path, number: int) -> None:
    """Compare each value in a step's file with what torch computes."""
    with safe_open(file, "pt") as found:
        for key, value in one_step(number).items():
            assert torch.equal(found.get_tensor(key), value), key


def test_every_value_of_a_streamed_step_is_what_torch_computed(tmp_path):
    assert run(TRAINING, tmp_path, 2).strip() == "[]"
    for number in range(2):
        assert_holds(tmp_path / f"step{number}/rank0/tensors.safetensors", number)


def test_a_disk_that_fills_up_in_the_middle_of_a_step_ends_the_dump_and_not_the_training(tmp_path):
    said = run(FULL_DISK, tmp_path, 2)
    assert "the training goes on" in said
    assert "too large" in said
    assert list(tmp_path.rglob("tensors.safetensors")) == []


def test_steps_before_a_kill_in_the_middle_of_a_stream_can_be_read(tmp_path):
    process = start(TRAINING, tmp_path, 10_000)
    try:
        ends = time.monotonic() + PATIENCE
        while not (tmp_path / "step1/rank0").exists() or not list(tmp_path.glob("step*/.rank0.partial/*.partial")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < ends, "no step is being streamed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)
    whole = sorted(tmp_path.glob("step*/rank0"))
    assert len(whole) >= 2
    for folder in whole:
        json.loads((folder / "dump.json").read_text())
        assert_holds(folder / "tensors.safetensors", int(folder.parent.name.removeprefix("step")))
