"""What the probe costs: CPU and wall time of a training step with it, against the same step without, one JSON line a figure.

    python -m benchmarks.overhead --quick
    python -m benchmarks.overhead --size tiny --variant "L1 stats"

Both trainings are seeded alike and run in lockstep, so every figure also states whether their losses were equal bits.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer

import trainprobe
from benchmarks.interleaved import Clocks, alternate, median_ratio
from benchmarks.models import SCOPES, SIZES, Scope, Training, prepare

NEVER = 10**9  # a step that no benchmark reaches: the probe is attached and sleeps

VARIANTS: dict[str, Mapping[str, Any] | None] = {
    "off": None,  # no probe on either side: the noise of the method itself
    "idle": {"level": "mix", "step": [NEVER]},
    "L0 stats": {"level": "L0"},
    "L1 stats": {"level": "L1"},
    "mix stats": {"level": "mix"},
    "L1 checksum": {"level": "L1", "summary": "checksum"},
    "L1 tensors": {"level": "L1", "task": "tensor"},
}
# the highest median ratio that is good enough, by (size, scope), in the order of VARIANTS
BARS: dict[tuple[str, Scope], tuple[float, ...]] = {
    ("real", "fwd+bwd"): (1.00, 1.01, 1.06, 1.12, 1.15, 1.15, 1.6),
    ("real", "whole step"): (1.00, 1.01, 1.06, 1.25, 1.30, 1.30, 2.0),
    ("tiny", "fwd+bwd"): (1.00, 1.03, 2.0, 3.0, 3.5, 3.0, 6.0),
    ("tiny", "whole step"): (1.00, 1.03, 1.6, 4.0, 4.5, 4.5, 10.0),
}


@dataclass(slots=True)
class Lockstep:
    """One side of a comparison: runs blocks of steps, remembers its losses, and keeps its disk use bounded."""

    training: Training
    block: int
    probe: Any = None
    folder: Path | None = None
    done: int = 0
    written: int = 0
    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def run(self) -> None:
        """Train one block of steps, inside `probe.step()` where there is a probe."""
        for _ in range(self.block):
            if self.probe is None:
                self.losses.append(self.training.step(self.done))
            else:
                with self.probe.step():
                    self.losses.append(self.training.step(self.done))
            self.done += 1

    def drain(self) -> None:
        """Wait until everything is on disk."""
        if self.probe is not None:
            self.probe.flush()

    def tidy(self) -> None:
        """Count the steps' files and give their room back, outside the clock.

        They are emptied and not deleted: ext4 passes over numbers of deleted files for minutes, one by one, at each new file.
        """
        for path in [] if self.folder is None else self.folder.glob("step*/**/*"):
            if path.is_file() and (size := path.stat().st_size):
                self.written += size
                os.truncate(path, 0)


def empty_folder_us(folder: Path, folders: int = 50) -> float:
    """Return the CPU time in microseconds that making a folder with three empty files takes there."""
    folder.mkdir(parents=True)
    begun = time.process_time()
    for i in range(folders):
        (folder / str(i)).mkdir()
        for name in "abc":
            os.close(os.open(folder / str(i) / name, os.O_CREAT | os.O_WRONLY))
    return 1e6 * (time.process_time() - begun) / folders


def measure(size_name: str, scope: Scope, variant: str, pairs: int) -> dict[str, Any]:
    """Measure one figure; see the module text for what its fields mean."""
    size = SIZES[size_name]
    plan = VARIANTS[variant]
    off = Lockstep(prepare(size, scope), size.block)
    on = Lockstep(prepare(size, scope), size.block)
    folder = Path(tempfile.mkdtemp(prefix="trainprobe_bench_"))
    try:
        folder_us = empty_folder_us(folder / "empty")
        if plan is None:
            offs, ons = alternate(off.run, on.run, on.drain, pairs)
        else:
            options = {"stacks": True, "construct": True, **plan}
            with trainprobe.watch(on.training.model, on.training.optimizer, output=folder / "dump", **options) as probe:
                on.probe, on.folder = probe, folder / "dump"
                offs, ons = alternate(off.run, on.run, on.drain, pairs, before=on.tidy)
                on.tidy()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**figure(size_name, scope, variant, off, on, offs, ons), "folder_us": round(folder_us, 1)}


def figure(
    size_name: str, scope: Scope, variant: str, off: Lockstep, on: Lockstep, offs: list[Clocks], ons: list[Clocks]
) -> dict[str, Any]:
    """Put one measurement into the fields that are printed."""
    ratios = {
        name: asdict(median_ratio([getattr(c, name) for c in ons], [getattr(c, name) for c in offs]))
        for name in ("cpu", "wall", "wall_drained")
    }
    bar = BARS[size_name, scope][list(VARIANTS).index(variant)]
    return {
        "figure": "overhead",
        "size": size_name,
        "scope": scope,
        "variant": variant,
        "ratio": round(ratios["cpu"]["median"], 4),
        "low": round(ratios["cpu"]["low"], 4),
        "high": round(ratios["cpu"]["high"], 4),
        "bar": bar,
        "met": ratios["cpu"]["median"] <= bar + (0.02 if variant == "off" else 0.0),
        "wall": {key: round(value, 4) for key, value in ratios["wall"].items()},
        "wall_until_on_disk": {key: round(value, 4) for key, value in ratios["wall_drained"].items()},
        "step_ms": round(1e3 * sorted(c.wall for c in offs)[len(offs) // 2] / off.block, 3),
        "pairs": len(offs),
        "steps_a_block": off.block,
        "bytes_a_step": on.written // max(on.done, 1),
        "losses_equal": all(map(torch.equal, off.losses, on.losses)) and len(off.losses) == len(on.losses),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="'fwd+bwd', 'whole step'")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="a column of the table, such as 'L1 stats'")] = None,
    quick: Annotated[bool, typer.Option(help="fewer pairs: a look, not a figure")] = False,
    threads: Annotated[int, typer.Option(help="threads of PyTorch's own kernels")] = 1,
) -> None:
    """Print one JSON line for each chosen size, scope and variant."""
    torch.set_num_threads(threads)
    for size_name in size or SIZES:
        pairs = (5 if size_name == "real" else 9) if quick else (15 if size_name == "real" else 41)
        for scope_name in SCOPES:
            if scope and scope_name not in scope:
                continue
            for name in variant or VARIANTS:
                line = measure(size_name, scope_name, name, pairs)
                sys.stdout.write(orjson.dumps(line).decode() + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
