"""Dumps of many calls, and what `dump-compare` of two of them takes beside the plain reading of their JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

OPS = 10  # of a module
STATISTICS = ("Max", "Min", "Mean", "Norm")
_COMPARE = ["-m", "trainprobe", "dump-compare", "-q"]
_READ = [
    "-c",
    "import gc, orjson, pathlib, sys\ngc.disable()\nfor path in sys.argv[1:]: orjson.loads(pathlib.Path(path).read_bytes())",
]
# a small process starts the one that is measured, as the peak of memory of a process is at least that of its parent
_LAUNCH = """
import json, os, subprocess, sys, time
start = time.perf_counter()
to, *command = sys.argv[1:]
started = subprocess.Popen(command, stdout=open(to, "w") if to else None)
_, status, used = os.wait4(started.pid, 0)
wall, code = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
print(json.dumps([used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024, code]), flush=True)
os._exit(0)
"""


class Used(NamedTuple):
    """What a process took. cpu, wall: seconds. memory: at most, in MiB. code: exit code. said: what it printed."""

    cpu: float
    wall: float
    memory: float
    code: int
    said: str


def measure(folder: Path, calls: int, repeats: int = 3) -> Iterator[str]:
    """Yield a line a comparison: of two dumps that agree, and of two that part after 60 % of their calls."""
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # what it takes to write them is no part of this process
        for name, differs_from in (("equal", -1), (f"apart from call {calls * 3 // 5:,} on", calls * 3 // 5)):
            b = folder / name.replace(",", "")
            a = apart.submit(write_large, folder / "a", calls).result()
            apart.submit(write_large, b, calls, differs_from=differs_from).result()
            files = [str(path) for side in (a, b) for path in sorted(side.glob("*/*/*.json"))]
            for _ in range(repeats):  # interleaved: the machine may be busy
                compared, read = used(*_COMPARE, str(a), str(b)), used(*_READ, *files)
                yield (
                    f"{calls:,} calls a side, {name}: dump-compare {_told(compared)}, exit code {compared.code}; "
                    f"orjson.loads of all files {_told(read)}; ratio {compared.cpu / read.cpu:.2f}\n    {compared.said}"
                )


def _told(used: Used) -> str:
    return f"{used.cpu:.2f} s of CPU, {used.wall:.2f} s, {used.memory:.0f} MiB"


def used(*arguments: str, program: str = sys.executable, quiet: bool = False) -> Used:
    """Run Python, or another program, in a process of its own, and return what it took from its start to its end."""
    launch = [sys.executable, "-c", _LAUNCH, "/dev/null" if quiet else "", program, *arguments]
    ran = subprocess.run(launch, capture_output=True, text=True, check=True)
    *said, numbers = ran.stdout.strip().splitlines()
    cpu, wall, memory, code = json.loads(numbers)
    return Used(cpu, wall, memory, code, " ".join(said[-1:]))


def write_large(folder: Path, calls: int, *, differs_from: int = -1, seed: int = 0) -> Path:
    """Write a dump of `calls` calls, modules with ten ops each, with statistics; return the folder.

    differs_from: place of the first call whose results, and those of all behind it, are those of another training; -1 for none.
    """
    at = folder / "step0" / "rank0"
    at.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed).standard_normal((calls + 1, 4)).astype(np.float32).astype(float)
    if differs_from >= 0:
        numbers[differs_from + 1 :] *= 1.01
    numbers[:, 3] = np.abs(numbers[:, 3])
    data, parents, stacks = {}, {}, []
    for i, (name, parent, entry) in enumerate(_entries(calls, numbers.tolist())):
        data[name] = entry
        parents[name] = parent
        if i % 50 == 0:
            stacks.append([[], [f"File model.py, line {i}, in forward, \n return self.block(x)"]])
        stacks[-1][0].append(name)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (at / "dump.json").write_bytes(orjson.dumps(head, option=orjson.OPT_INDENT_2))
    (at / "construct.json").write_bytes(orjson.dumps(parents))
    (at / "stack.json").write_bytes(orjson.dumps({str(i): stack for i, stack in enumerate(stacks)}))
    return folder


def _entries(calls: int, numbers: list[list[float]]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Yield the name, the parent and the content of each call."""
    module = ""
    for i in range(calls):
        first = i % (OPS + 1) == 0
        layer = i // (OPS + 1)
        if first:
            module = f"Module.layers.{layer}.Block.forward.0"
        given, result = _leaf(numbers[i]), _leaf(numbers[i + 1])
        name = module if first else f"Functional.linear.{i}.forward"
        yield name, None if first else module, {"input_args": [given, given], "input_kwargs": {}, "output": [result]}


def _leaf(numbers: list[float]) -> dict[str, Any]:
    about = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 128, 1024]}
    return {**about, **dict(zip(STATISTICS, numbers, strict=True)), "requires_grad": True}
