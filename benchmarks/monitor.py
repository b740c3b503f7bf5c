"""What the monitor and the audit cost: CPU and wall time of a training step with them, against the same step without.

    python -m benchmarks.monitor --quick
    python -m benchmarks.monitor --size tiny --variant "audit"

Same method as `benchmarks.overhead`: seeded alike, in lockstep, blocks interleaved, the median ratio of CPU time. A block
holds as many steps as the variant's interval.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer

import trainprobe
from benchmarks.interleaved import alternate, median_ratio
from benchmarks.models import SIZES, prepare
from benchmarks.overhead import Lockstep

ALL = {"activations": True, "parameters": True, "gradients": True, "optimizer_state": True}
NONE = {"activations": False, "parameters": False, "gradients": False, "optimizer_state": False}
DEFAULT = {"activations": False, "parameters": True, "gradients": True, "scalars": True}  # engine.plan.defaults.default_plan
# variant → plan, least steps a block, bars for (real, tiny)
VARIANTS: dict[str, tuple[Mapping[str, Any], int, tuple[float, float]]] = {
    "monitor all": ({"monitor": ALL}, 1, (1.10, 1.7)),
    "monitor all, black box": ({"monitor": ALL, "black_box": True}, 1, (1.10, 1.6)),
    "monitor gradients": ({"monitor": {**NONE, "gradients": True}}, 1, (1.02, 1.3)),
    "audit": ({"audit": True}, 10, (1.03, 1.1)),
    "audit every step": ({"audit": {"every": 1}}, 1, (1.2, 2.0)),
    "default plan": ({"monitor": DEFAULT, "audit": True}, 20, (1.10, 2.0)),
    "default plan, audited step": ({"monitor": DEFAULT, "audit": {"every": 1}}, 1, (1.3, 5.0)),
    "default plan, other step": ({"monitor": DEFAULT}, 1, (1.05, 1.5)),
}


def measure(size_name: str, variant: str, pairs: int) -> dict[str, Any]:
    """Measure one figure: the ratio of CPU time over pairs of blocks, and whether the losses were equal bits."""
    size = SIZES[size_name]
    plan, least, bars = VARIANTS[variant]
    block = max(size.block, least)
    off, on = (Lockstep(prepare(size, "whole step"), block) for _ in range(2))
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_bench_"))
    try:
        with trainprobe.watch(on.training.model, on.training.optimizer, level="off", output=folder / "out", **plan) as probe:
            on.probe, on.folder = probe, folder / "out"
            offs, ons = alternate(off.run, on.run, on.drain, pairs, warmup=1)
            found = [f.message for f in probe.findings if f.severity != "info"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cpu = median_ratio([c.cpu for c in ons], [c.cpu for c in offs])
    wall = median_ratio([c.wall for c in ons], [c.wall for c in offs])
    bar = bars[0] if size_name == "real" else bars[1]
    return {
        "figure": "monitor",
        "size": size_name,
        "variant": variant,
        "ratio": round(cpu.median, 4),
        "low": round(cpu.low, 4),
        "high": round(cpu.high, 4),
        "bar": bar,
        "met": cpu.median <= bar,
        "wall": {key: round(value, 4) for key, value in asdict(wall).items()},
        "step_ms": round(1e3 * sorted(c.wall for c in offs)[len(offs) // 2] / block, 3),
        "pairs": pairs,
        "steps_a_block": block,
        "losses_equal": all(map(torch.equal, off.losses, on.losses)) and len(off.losses) == len(on.losses),
        "findings": found,
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="such as 'audit'")] = None,
    quick: Annotated[bool, typer.Option(help="fewer pairs: a look, not a figure")] = False,
) -> None:
    """Print one JSON line for each chosen size and variant."""
    torch.set_num_threads(1)
    for size_name in size or SIZES:
        pairs = (3 if size_name == "real" else 7) if quick else (9 if size_name == "real" else 31)
        for name in variant or VARIANTS:
            sys.stdout.write(orjson.dumps(measure(size_name, name, pairs)).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
