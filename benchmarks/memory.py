"""What the probe costs in memory: peak resident size of a training with it, against the same training without.

    python -m benchmarks.memory
    python -m benchmarks.memory --variant "L1 stats" --steps 200

Each training runs in its own process, several times, as the peaks of equal trainings differ (by 28 MB on `real`: where the
allocator puts things). One JSON line a variant: the extra peak, the bar of statistics (2 % of the model's own peak and
50 MB), and the growth between the tenth step and the last, which must stay near that of the bare training; all as medians,
and the peaks one by one.
"""

from __future__ import annotations

import os
import resource
import statistics
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


def repeated(size_name: str, variant: str, steps: int, repeats: int) -> tuple[float, float, list[float]]:
    """Return the median peak and the median growth of equal trainings, and their peaks from the lowest to the highest."""
    runs = [in_child(size_name, variant, steps) for _ in range(repeats)]
    peaks = sorted(run["peak"] for run in runs)
    return statistics.median(peaks), statistics.median(run["growth"] for run in runs), [round(peak, 1) for peak in peaks]


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="such as 'L1 stats'")] = None,
    steps: Annotated[int | None, typer.Option(help="steps to train: by default 20 of real, 200 of tiny")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="trainings of each variant")] = 5,
) -> None:
    """Print one JSON line for each chosen size and variant."""
    for size_name in size or SIZES:
        count = steps or {"real": 20, "tiny": 200}[size_name]
        peak_off, growth_off, peaks_off = repeated(size_name, "off", count, repeats)
        for name in variant or [v for v in VARIANTS if v != "off"]:
            peak, growth, peaks = repeated(size_name, name, count, repeats)
            extra = peak - peak_off
            bar = None if name == "L1 tensors" else 0.02 * peak_off + 50  # values that wait to be written take their room
            line = {
                "figure": "memory",
                "size": size_name,
                "variant": name,
                "peak_off_mb": round(peak_off, 1),
                "extra_mb": round(extra, 1),
                "bar_mb": None if bar is None else round(bar, 1),
                "met": None if bar is None else extra <= bar,
                "growth_off_mb": round(growth_off, 1),
                "growth_mb": round(growth, 1),
                "steps": count,
                "peaks_off_mb": peaks_off,
                "peaks_mb": peaks,
            }
            sys.stdout.write(orjson.dumps(line).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
