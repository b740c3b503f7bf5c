"""Dumps of stored tensors: what reading and measuring them takes beside `cat` of the same files and beside mindstudio-probe."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import orjson
import torch

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
    """Yield a line a comparison, then the medians."""
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # what it takes to write them is no part of this process
        a, b = (apart.submit(_write, folder / side, tensors, noise).result() for side, noise in (("a", 0.0), ("b", 1e-6)))
    files = [path for side in (a, b) for path in sorted((side / "dump_tensor_data").iterdir())]
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
    peer = os.environ.get("TRAINPROBE_MSPROBE_PYTHON")
    if peer:
        paths = ["-tp", str(a / "dump.json"), "-gp", str(b / "dump.json"), "-o", str(folder / "theirs")]
        theirs = used("-m", "msprobe.msprobe", "compare", *paths, program=peer)
        yield f"msprobe compare: {_told(theirs)}, exit code {theirs.code}"


def _told(command: Used) -> str:
    return f"{command.cpu:.1f} s of CPU, {command.wall:.1f} s, {command.memory:.0f} MiB"


def _write(side: Path, tensors: int, noise: float) -> Path:
    """Write a dump of calls that give one tensor each; return its rank's folder."""
    rank = side / _RANK
    (rank / "dump_tensor_data").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    data: dict[str, object] = {}
    for i in range(tensors):
        name = f"Functional.linear.{i}.forward"
        tensor = torch.randn(ROWS, COLUMNS, generator=generator)
        tensor = tensor + noise * tensor.flip(0) if noise else tensor
        file = f"{name}.output.0.pt"
        torch.save(tensor, rank / "dump_tensor_data" / file)
        numbers = {"Max": tensor.max(), "Min": tensor.min(), "Mean": tensor.mean(), "Norm": tensor.norm()}
        about = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [ROWS, COLUMNS]}
        leaf = {**about, **{key: float(x) for key, x in numbers.items()}, "requires_grad": True, "data_name": file}
        data[name] = {"input_args": [], "input_kwargs": {}, "output": [leaf]}
    where = str(rank / "dump_tensor_data")
    head = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": where, "data": data}
    (rank / "dump.json").write_bytes(orjson.dumps(head))
    (rank / "construct.json").write_bytes(orjson.dumps({}))
    (rank / "stack.json").write_bytes(orjson.dumps({"0": [list(data), ["File model.py, line 1, in forward, \n return x"]]}))
    return rank
