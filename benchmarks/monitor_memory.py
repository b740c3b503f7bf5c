"""Whether the monitor's memory stays flat over a long run: resident size of a tiny training at 1,000 and at 10,000 steps.

    python -m benchmarks.monitor_memory
    python -m benchmarks.monitor_memory --variant everything --steps 3000

Each variant runs in its own process; `off` is the training alone. One JSON line a variant: resident size in MB at every
thousandth step, and the growth from step 1,000 to the last one. The record log on disk is emptied now and then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer

import trainprobe
from benchmarks.memory import resident
from benchmarks.models import SIZES, prepare

ALL = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
FEATURES = {"attention": True, "weights": True, "formats": {"every": 10}, "dead_units": True}
VARIANTS: dict[str, Mapping[str, Any] | None] = {
    "off": None,
    "monitor all": {"monitor": ALL},
    "everything": {
        "monitor": {**ALL, "update": True, "batches": True, "collectives": True, "features": FEATURES},
        "audit": True,
        "black_box": True,
    },
}
FLAT = 5.0  # MB that a run may grow by from its thousandth step on


def train(variant: str, steps: int) -> list[float]:
    """Train in this process; return resident memory in MB after each thousand steps."""
    torch.set_num_threads(1)
    side, plan = prepare(SIZES["tiny"], "whole step"), VARIANTS[variant]
    sizes: list[float] = []
    with tempfile.TemporaryDirectory(prefix="trainprobe_bench_") as folder:
        if plan is None:
            for step in range(steps):
                side.step(step)
                if (step + 1) % 1000 == 0:
                    sizes.append(resident())
            return sizes
        out = Path(folder) / "out"
        with trainprobe.watch(side.model, side.optimizer, output=out, level="off", sinks=["parquet"], **plan) as probe:
            for step in range(steps):
                with probe.step(step):
                    probe.note("loss", side.step(step))
                if (step + 1) % 250 == 0:
                    probe.flush()
                    for segment in out.rglob("metrics-*.parquet"):
                        segment.unlink()
                if (step + 1) % 1000 == 0:
                    sizes.append(resident())
    return sizes


def in_child(variant: str, steps: int) -> list[float]:
    """Call `train` in a fresh process and return its answer."""
    code = f"import orjson, benchmarks.monitor_memory as m; print(orjson.dumps(m.train({variant!r}, {steps})).decode())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return orjson.loads(done.stdout.splitlines()[-1])


def main(
    variant: Annotated[list[str] | None, typer.Option(help="off, monitor all, everything")] = None,
    steps: Annotated[int, typer.Option(help="steps to train, at least 2000")] = 10_000,
) -> None:
    """Print one JSON line for each chosen variant."""
    for name in variant or VARIANTS:
        sizes = in_child(name, steps)
        growth = sizes[-1] - sizes[0]
        line = {
            "figure": "monitor memory",
            "variant": name,
            "steps": steps,
            "mb": [round(size, 1) for size in sizes],
            "growth_mb": round(growth, 1),
            "flat": growth <= FLAT,
        }
        sys.stdout.write(orjson.dumps(line).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
