"""The prepared run for a GPU is rehearsed on the CPU: from the wheel, in a folder of its own, as it would run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="run by `make test-wheels`, in an environment of its own")

ROOT = Path(__file__).parents[2]
PARTS = ("transfers", "overhead", "bits", "kernels", "operators")  # tests/self_test runs the other


def test_every_part_of_the_prepared_run_is_rehearsed_from_the_bundle(wheel, tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRAINPROBE"))}
    out = tmp_path / "out"
    environment = {**clean, "PYTHON": sys.executable, "BUNDLE": str(wheel.parent), "OUT": str(out), "OMP_NUM_THREADS": "1"}
    command = ["bash", ROOT / "benchmarks" / "gpu" / "run.sh", "--rehearse", *(w for p in PARTS for w in ("--only", p))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + (out / "log.txt").read_text()[-3000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    ends = {line["part"]: line["how"] for line in lines if line["figure"] == "end"}
    assert ends == dict.fromkeys(PARTS, "whole")
    cells = [line for line in lines if line["figure"] == "bits"]
    assert len(cells) > 20 and all(line["met"] for line in cells)
    assert {line["variant"] for line in lines if line["figure"] == "overhead"} >= {"idle", "L0", "L1", "mix", "default plan"}
    assert sum(line["figure"] == "sweep" for line in lines) > 10
    assert [line for line in lines if line["part"] == "operators" and line["figure"] == "operators"][-1]["entries"] > 4


def test_a_part_that_dies_is_told_and_the_others_run(wheel, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--output", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT)])
    done = subprocess.run(
        [*command, "--device", "no_such_device", "--only", "transfers", "--only", "kernels"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ends = [(line["part"], line["how"], line["met"]) for line in lines if line["figure"] == "end"]
    assert ends == [(part, "exit code 1: see log.txt", False) for part in ("transfers", "kernels")]
    assert "no_such_device" in (tmp_path / "log.txt").read_text()
