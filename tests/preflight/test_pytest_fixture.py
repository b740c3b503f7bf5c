"""The fixture in a session of pytest of its own: what is broken fails, what nothing could be said of fails too."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
TESTS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])

def batch():
    return torch.randn(6, 4), torch.arange(6) % 3

def test_whole(trainprobe_preflight):
    assert trainprobe_preflight(loss, nn.Linear(4, 3), batch(), only=["rows"]).lines[0].status == "holds"

def test_broken(trainprobe_preflight):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))
    trainprobe_preflight(loss, Centred(4, 3), batch(), only=["rows"])

def test_nothing(trainprobe_preflight):
    trainprobe_preflight(loss, nn.Linear(4, 3), batch(), only=["padding"])
"""


def test_what_is_broken_fails(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = {point.name for point in importlib.metadata.entry_points(group="pytest11")}
    plugin = [] if "trainprobe_preflight" in installed else ["-p", told["trainprobe_preflight"]]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "test_it.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "rows         BROKEN: changing row 5 changes the outputs of other rows" in done.stdout
    assert "no property could be tested" in done.stdout


def test_the_plugin_alone_imports_no_torch():
    code = "import sys, trainprobe.preflight.pytest_fixture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
