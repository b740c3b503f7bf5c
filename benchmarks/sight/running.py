"""Runs a program as its user would: in a process of its own, in an empty folder, with nothing set."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ALARMS = ("warning", "error")
Program = Callable[..., None]


def run(program: Program, *bug: str, ranks: int = 1, timeout: float = 300) -> list[dict[str, Any]]:
    """Train once, with the switch `bug` where the program has one, and return the findings of all ranks, by their steps.

    Raises RuntimeError when the program fails or is not done after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="trainprobe_sight_") as folder:
        record(program, Path(folder), *bug, ranks=ranks, timeout=timeout)
        files = sorted(Path(folder).glob("probe_out*/rank*/findings.jsonl"))
        told = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return sorted(told, key=lambda finding: 1 << 30 if finding["step"] is None else finding["step"])


def record(program: Program, folder: Path, *bug: str, ranks: int = 1, timeout: float = 300) -> None:
    """Train once, as `run` does, in a folder that stays. Raises RuntimeError as `run` does."""
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=_child, args=(program, bug, rank, ranks, folder)) for rank in range(ranks)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout)
        process.kill()
        process.join()
    if any(process.exitcode for process in running):
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
        raise RuntimeError(f"{program.__name__}{bug} failed:\n{logs}")


def alarms(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a user is warned of."""
    return [finding for finding in findings if finding["severity"] in ALARMS]


def _child(program: Program, bug: tuple[str, ...], rank: int, ranks: int, folder: Path) -> None:
    os.chdir(folder)
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    program(*bug)
    if ranks > 1:
        dist.destroy_process_group()
    sys.stdout.flush()
