"""Starts a program of this folder in a process of its own, and returns what it printed as JSON in its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "GLOG_v": "3", "TRAINPROBE_ON_ERROR": "raise"}


def run(program: str, *arguments: str, cwd: Path, timeout: float = 540) -> Any:
    """Run `program.py`; raises AssertionError with its output when it fails or says nothing."""
    done = subprocess.run(
        [sys.executable, str(HERE / f"{program}.py"), *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, (
        f"{program} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return json.loads(lines[-1])


def msrun(program: str, *arguments: str, workers: int, port: int, cwd: Path, timeout: float = 540) -> list[str]:
    """Run `program.py` under msrun; returns each worker's log. Raises AssertionError with the logs when it fails."""
    command: Sequence[str] = (
        *(str(Path(sys.executable).parent / "msrun"), f"--worker_num={workers}", f"--local_worker_num={workers}"),
        *(f"--master_port={port}", f"--log_dir={cwd / 'logs'}", "--join=True", str(HERE / f"{program}.py"), *arguments),
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", "-k", "5", str(int(timeout)), *command],
        cwd=cwd,
        env={**ENVIRONMENT, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = [(cwd / f"logs/worker_{i}.log").read_text(errors="replace") for i in range(workers) if (cwd / "logs").exists()]
    assert done.returncode == 0, f"msrun ended with {done.returncode}:\n{done.stderr[-2000:]}\n" + "\n".join(
        log[-3000:] for log in logs
    )
    return logs
