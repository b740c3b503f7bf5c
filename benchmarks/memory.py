"""What the probe costs in memory: peak resident size of a training with it, against the same training without.

    python -m benchmarks.memory
    python -m benchmarks.memory --variant "L1 stats" --steps 200

Each training runs in its own process. One JSON line a variant: the extra peak, the bar (2 % of the model's own peak and
50 MB), and the growth between the tenth step and the last, which must stay near zero.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer

import trainprobe
from benchmarks.models import SIZES, prepare
from benchmarks.overhead import VARIANTS, Lockstep

SETTLED = 10  # steps after which allocators and caches have reached their size
MB = 1e6


def train(size_name: str, variant: str, steps: int) -> dict[str, float]:
    """Train in this process; return peak and growth of its resident memory, in MB."""
    torch.set_num_threads(1)
    plan = VARIANTS[variant]
    with tempfile.TemporaryDirectory(prefix="trainprobe_bench_") as folder:
        side = Lockstep(prepare(SIZES[size_name], "whole step"), block=1)
        if plan is None:
            growth = settle_and_run(side, steps)
        else:
            output = Path(folder) / "dump"
            with trainprobe.watch(side.training.model, side.training.optimizer, output=output, **plan) as probe:
                side.probe, side.folder = probe, output
                growth = settle_and_run(side, steps)
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB, "growth": growth}


def settle_and_run(side: Lockstep, steps: int) -> float:
    """Run all steps; return by how many MB the process grew after the first few."""
    settled = 0.0
    for step in range(steps):
        side.run()
        side.drain()
        side.tidy()
        if step == SETTLED - 1:
            settled = resident()
    return resident() - settled


def resident() -> float:
    """Return the resident memory of this process now, in MB (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MB


def in_child(size_name: str, variant: str, steps: int) -> dict[str, Any]:
    """Call `train` in a fresh process and return its answer."""
    code = f"import orjson, benchmarks.memory as m; print(orjson.dumps(m.train({size_name!r}, {variant!r}, {steps})).decode())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=1800
    )
    return orjson.loads(done.stdout.splitlines()[-1])


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="such as 'L1 stats'")] = None,
    steps: Annotated[int | None, typer.Option(help="steps to train: by default 20 of real, 200 of tiny")] = None,
) -> None:
    """Print one JSON line for each chosen size and variant."""
    for size_name in size or SIZES:
        count = steps or {"real": 20, "tiny": 200}[size_name]
        off = in_child(size_name, "off", count)
        for name in variant or [v for v in VARIANTS if v != "off"]:
            on = in_child(size_name, name, count)
            extra, bar = on["peak"] - off["peak"], 0.02 * off["peak"] + 50
            line = {
                "figure": "memory",
                "size": size_name,
                "variant": name,
                "peak_off_mb": round(off["peak"], 1),
                "extra_mb": round(extra, 1),
                "bar_mb": round(bar, 1),
                "met": extra <= bar,
                "growth_off_mb": round(off["growth"], 1),
                "growth_mb": round(on["growth"], 1),
                "steps": count,
            }
            sys.stdout.write(orjson.dumps(line).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
