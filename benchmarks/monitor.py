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
from benchmarks.interleaved import alternate, clock, median_ratio
from benchmarks.models import SIZES, prepare
from benchmarks.overhead import Lockstep
from trainprobe.monitor.audit.plan import AuditPlan

ALL = {"activations": True, "parameters": True, "gradients": True, "optimizer_state": True}
NONE = {"activations": False, "parameters": False, "gradients": False, "optimizer_state": False}
DEFAULT = {"activations": False, "parameters": True, "gradients": True, "scalars": True}  # engine.plan.defaults.default_plan
# variant → plan, least steps a block, bars for (real, tiny)
VARIANTS: dict[str, tuple[Mapping[str, Any], int, tuple[float, float]]] = {
    "monitor all": ({"monitor": ALL}, 1, (1.10, 1.7)),
    "monitor all, black box": ({"monitor": ALL, "black_box": True}, 1, (1.10, 1.6)),
    "monitor gradients": ({"monitor": {**NONE, "gradients": True}}, 1, (1.02, 1.3)),
    "loss rows": ({"monitor": {**NONE, "scalars": False, "features": {"loss_rows": True}}}, 1, (1.02, 1.3)),
    "replay": ({"monitor": {**NONE, "scalars": False}, "replay": True}, 1, (1.2, 2.0)),
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


def by_step(size_name: str, steps: int) -> dict[str, Any]:
    """Measure the default plan: CPU time of single steps, each against the same step without, and of all of them together."""
    off, on = (Lockstep(prepare(SIZES[size_name], "whole step"), 1) for _ in range(2))
    for side in (off, on):
        side.run()  # the first step of a training makes the state of its optimizer
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_bench_"))
    plain: list[float] = []
    watched: list[float] = []
    audited = [step for step in range(steps) if AuditPlan().wants_step(step)]
    try:
        plan: dict[str, Any] = {"monitor": DEFAULT, "audit": True, "level": "off", "output": folder / "out"}
        with trainprobe.watch(on.training.model, on.training.optimizer, **plan) as probe:
            on.probe, on.folder = probe, folder / "out"
            for step in range(steps):
                for side in (off, on) if step % 2 == 0 else (on, off):
                    told = watched if side is on else plain
                    told.append(clock(side.run, side.drain).cpu)
            found = [f.message for f in probe.findings if f.severity != "info"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, Any] = {"figure": "by step", "size": size_name, "steps": steps, "audited": audited, "findings": found}
    for name, chosen in (("audited step", audited), ("other step", sorted(set(range(steps)) - set(audited)))):
        ratio = median_ratio([watched[i] for i in chosen], [plain[i] for i in chosen])
        figures[name] = [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)]
    figures["each audited step"] = [round(watched[i] / plain[i], 3) for i in audited]
    figures["all"], figures["all behind the first two"] = (round(sum(watched[i:]) / sum(plain[i:]), 4) for i in (0, 2))
    return figures


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="such as 'audit'")] = None,
    quick: Annotated[bool, typer.Option(help="fewer pairs: a look, not a figure")] = False,
    steps: Annotated[int, typer.Option(help="instead: the default plan over so many steps, audited ones and others apart")] = 0,
) -> None:
    """Print one JSON line for each chosen size and variant."""
    torch.set_num_threads(1)
    for size_name in size or SIZES:
        if steps:
            sys.stdout.write(orjson.dumps(by_step(size_name, steps)).decode() + "\n")
            continue
        pairs = (3 if size_name == "real" else 7) if quick else (9 if size_name == "real" else 31)
        for name in variant or VARIANTS:
            sys.stdout.write(orjson.dumps(measure(size_name, name, pairs)).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
