"""Print the memory that judging takes: `python -m benchmarks.op_check.memory [--mib N] [--calls N]`.

Each operator is recorded in float32, forward and backward, with results of N MiB, once and then several times with other
inputs. A process of its own judges each dump; what its memory peaks at (RssAnon, looked at each 5 ms; pages of the dump that
the system keeps in memory are not in it), beyond that of judging a tiny dump, is set against the values of one call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

import trainprobe

_CHILD = """
import re, sys, threading
from pathlib import Path
import torch
from trainprobe.op_check.dump import check_dump, rank_folders
from trainprobe.op_check.standards.measured import outputs_and_second
torch.set_num_threads(1)
done, most = threading.Event(), [0]
def look():
    while not done.wait(0.005):
        most[0] = max(most[0], int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
looking = threading.Thread(target=look)
looking.start()
check_dump(rank_folders(Path(sys.argv[1])), measure=outputs_and_second if sys.argv[2] == "standard" else None)
done.set()
looking.join()
print(most[0] / 1024)
"""
Operator = Callable[[torch.Tensor], torch.Tensor]
OPERATORS: dict[str, Operator] = {
    "matmul": lambda x: torch.matmul(x, x),
    "softmax": lambda x: functional.softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "add": lambda x: torch.add(x, x),
}


class One(nn.Module):
    """One operator, and the sum of its results in a backward."""

    def __init__(self, call: Operator) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def record(folder: Path, call: Operator, rows: int, times: int) -> int:
    """Record an operator; return the bytes of the values of its largest call, the backward."""
    model = One(call)
    settings: dict[str, Any] = {"level": "L1", "task": "tensor", "step": [0], "output": str(folder), "console": False}
    with trainprobe.watch(model, **settings) as probe, probe.step():
        for seed in range(times):
            torch.manual_seed(seed)
            x = torch.randn(rows, rows, requires_grad=True)
            y = model(x)
            y.backward(torch.randn_like(y))
    held = json.loads(next(folder.rglob("dump.json")).read_text())["data"]
    sizes = {entry: sum(_bytes(value) for value in _leaves(call)) for entry, call in held.items()}
    return max(
        size + sizes.get(entry.replace(".backward", ".forward"), 0) for entry, size in sizes.items() if ".backward" in entry
    )


def _leaves(tree: Any) -> list[dict[str, Any]]:
    if isinstance(tree, dict):
        return [tree] if "shape" in tree else [leaf for item in tree.values() for leaf in _leaves(item)]
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list) else []


def _bytes(leaf: dict[str, Any]) -> int:
    return 4 * torch.Size(leaf["shape"]).numel()


def peak(folder: Path, kind: str) -> float:
    """Return what a process that judges a dump peaks at, in MiB."""
    ran = subprocess.run([sys.executable, "-c", _CHILD, str(folder), kind], capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[0])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--mib", type=int, default=16)
    asked.add_argument("--calls", type=int, default=6)
    options = asked.parse_args()
    rows = int((options.mib * 2**20 / 4) ** 0.5) // 256 * 256
    with tempfile.TemporaryDirectory() as root:
        record(Path(root, "tiny"), OPERATORS["add"], 256, 1)
        base = {kind: peak(Path(root, "tiny"), kind) for kind in ("judge", "standard")}
    print(f"judging a tiny dump takes {base['judge']:.0f} MiB; then operator, MiB of a call's values, and the peak over that:")
    print(f"1 call, {options.calls} calls, {options.calls} calls by a standard")
    for name, call in OPERATORS.items():
        found: list[float] = []
        size = 0.0
        for times, kind in ((1, "judge"), (options.calls, "judge"), (options.calls, "standard")):
            with tempfile.TemporaryDirectory() as root:
                size = record(Path(root), call, rows, times) / 2**20
                found.append((peak(Path(root), kind) - base[kind]) / size)
        print(f"{name:12} {size:6.0f}  " + "  ".join(f"{each:5.1f}" for each in found), flush=True)


main()
