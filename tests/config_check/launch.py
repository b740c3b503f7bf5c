"""Runs the training scripts of `runs/` in processes of their own, on one rank or two, and compares what they leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributed.launch import ONE_RANK, free_port
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.engine.at_start import VARIABLE as AT_START

ROOT = Path(__file__).resolve().parents[2]
# a copy outside of the repository, whose changes would else be found as changes of the training code
_COPY = tempfile.TemporaryDirectory(prefix="config_check_runs_")
_AT_START = dict(os.environ)  # frameworks that are imported later set variables of their own
RUNS = Path(shutil.copytree(Path(__file__).parent / "runs", Path(_COPY.name) / "runs"))


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in _AT_START.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", AT_START}}
    path = os.pathsep.join([str(ROOT), *filter(None, [more.pop("PYTHONPATH", "")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRAINPROBE_ON_ERROR": "raise", **more}


def run(*command: str | Path, ranks: int = 1, distributed: bool = False, timeout: float = 300, **variables: str) -> str:
    """Run a Python script on each rank; return what rank 0 printed. Fails with the output of a rank that failed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if distributed or ranks > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, (ONE_RANK, *command) if ranks > 1 else command)],
                env=environment(**variables, **own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=RUNS,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs[0]


def compared(folder: Path, change: str, base: str = "base") -> PackComparison:
    return compare_packs(read_pack(folder / f"{base}.zip"), read_pack(folder / f"{change.replace(' ', '_')}.zip"))
