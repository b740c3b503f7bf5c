"""The kernels compile to machine code of NVIDIA devices; that says nothing about a run on one, which no test here makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainprobe.engine.arrays import triton_rows


@pytest.mark.parametrize("target", [80, 90])
def test_every_dtype_compiles_and_keeps_subnormals_and_order(target: int, tmp_path: Path) -> None:
    """No flushing of subnormals, no atomics, no fused or approximate float64."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton_kernels.compile_kernels", str(target)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr[-3000:]
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert {(line["target"], line["dtype"]) for line in told} == {(target, kind.name) for kind in triton_rows.KINDS.values()}
    assert all(line["bytes"] > 0 and line["found"] == [] for line in told), [line for line in told if line["found"]]
