"""Dumps of stored tensors: what reading and measuring them takes beside `cat` of the same files and beside mindstudio-probe."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import trainprobe
from benchmarks.dump_compare.large import Used, used

ROWS, COLUMNS = 4096, 4096  # of a tensor of float32: 64 MiB
_RANK = Path("step0/rank0")
_MEASURE = """
import json, pathlib, sys, time
import torch  # which reads .pt files; its import is no part of the reading
from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.pairing import RankPair
start = time.process_time()
judged = compare_rank(RankPair(0, 0, *map(pathlib.Path, sys.argv[1:]))).calls
print(time.process_time() - start, {one.outcome for one in judged}, {v.interval.evidence for one in judged for v in one.values})
"""


def measure(folder: Path, tensors: int = 7, repeats: int = 5) -> Iterator[str]:
    """Yield a line a comparison, then the medians: of one file a step, as the probe writes by default, and of `.pt` files."""
    for form in ("safetensors", "pt"):
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # what it takes to write them is no part of this process
            made = [
                apart.submit(_write, folder / form / side, tensors, noise, form) for side, noise in (("a", 0.0), ("b", 1e-6))
            ]
            a, b = (side.result() for side in made)
        yield f"{form}:"
        yield from _measure(a, b, repeats)
    peer = os.environ.get("TRAINPROBE_MSPROBE_PYTHON")
    if peer:
        paths = ["-tp", str(a / "dump.json"), "-gp", str(b / "dump.json"), "-o", str(folder / "theirs")]
        theirs = used("-m", "msprobe.msprobe", "compare", *paths, program=peer)
        yield f"msprobe compare: {_told(theirs)}, exit code {theirs.code}"


def _measure(a: Path, b: Path, repeats: int) -> Iterator[str]:
    files = [path for side in (a, b) for path in sorted(side.rglob("*")) if path.is_file() and path.stat().st_size > 1 << 20]
    size = sum(path.stat().st_size for path in files) / 1e9
    used("-c", _MEASURE, str(a), str(b))  # the files are in the cache from here on
    rates: list[tuple[float, float]] = []
    for _ in range(repeats):  # interleaved: the machine may be busy
        cat = used(*map(str, files), program="cat", quiet=True)
        ours = used("-c", _MEASURE, str(a), str(b))
        seconds = float(ours.said.split()[0])
        rates.append((size / cat.cpu, size / seconds))
        yield (
            f"{size:.2f} GB: cat {rates[-1][0]:.1f} GB/s of CPU, dump-compare {rates[-1][1]:.1f} GB/s, "
            f"{rates[-1][1] / rates[-1][0]:.2f} of it, {ours.memory:.0f} MiB at most\n    {ours.said}"
        )
    middle = statistics.median(ours / cat for cat, ours in rates)
    yield f"median of {repeats}: {middle:.2f} of what cat reads a second of CPU"
    command = used("-m", "trainprobe", "dump-compare", "-q", str(a), str(b))
    yield f"the command, from its start to its end: {_told(command)}, exit code {command.code}"


def _told(command: Used) -> str:
    return f"{command.cpu:.1f} s of CPU, {command.wall:.1f} s, {command.memory:.0f} MiB"


def _write(side: Path, tensors: int, noise: float, form: str) -> Path:
    """Record calls that give one tensor each; return the folder of their rank."""
    generator = torch.Generator().manual_seed(0)
    plan: Any = {
        "level": "L1",
        "task": "tensor",
        "data": ["output"],
        "ops": ["Torch.add"],
        "tensor_format": form,
        "output": side,
    }
    with trainprobe.watch(torch.nn.Identity(), **plan, console=False, sinks=["dump"]) as probe, probe.step():
        for _ in range(tensors):
            tensor = torch.randn(ROWS, COLUMNS, generator=generator)
            torch.add(tensor, tensor.flip(0), alpha=noise)
    return side / _RANK
