"""The same two GPTs under mindstudio-probe, the tool people have now, in an environment where that is installed.

    python -m benchmarks.incumbent --quick

Its patches stay in the process once it is imported, so bare and recorded blocks cannot alternate: each child process times
bare blocks first, then imports the tool and times recorded ones; the ratio is formed within each child.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.interleaved import clock
from benchmarks.models import SCOPES, SIZES, Scope, prepare

VARIANTS: dict[str, dict[str, Any]] = {
    "idle": {"task": "statistics", "level": "mix", "step": [10**6]},
    "L0 stats": {"task": "statistics", "level": "L0"},
    "L1 stats": {"task": "statistics", "level": "L1"},
    "mix stats": {"task": "statistics", "level": "mix"},
    "L1 md5": {"task": "statistics", "level": "L1", "statistics": {"summary_mode": "md5"}},
    "L1 tensors": {"task": "tensor", "level": "L1"},
}


def train(size_name: str, scope: Scope, variant: str, blocks: int) -> float:
    """Return on / off of the median CPU time of a step, measured in this process."""
    torch.set_num_threads(1)
    training = prepare(SIZES[size_name], scope)
    steps = max(1, SIZES[size_name].block // 4)

    def bare() -> None:
        for i in range(steps):
            training.step(i)

    bare()
    off = [clock(bare, lambda: None).cpu for _ in range(blocks)]
    from msprobe.pytorch import PrecisionDebugger  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="incumbent_") as folder:
        settings = {"dump_path": folder, "rank": [], "step": [], "statistics": {}, "tensor": {}, **VARIANTS[variant]}
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(settings))
        debugger = PrecisionDebugger(config_path=str(config))

        def recorded() -> None:
            for i in range(steps):
                debugger.start(model=training.model)
                training.step(i)
                debugger.stop()
                debugger.step()

        recorded()
        on: list[float] = []
        for _ in range(blocks):
            for path in Path(folder).glob("step*"):
                shutil.rmtree(path)
            on.append(clock(recorded, lambda: None).cpu)
    return median(on) / median(off)


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="such as 'L1 stats'")] = None,
    quick: Annotated[bool, typer.Option(help="one child a figure")] = False,
) -> None:
    """Print one JSON line for each size, scope and variant."""
    for size_name in size or SIZES:
        for scope in SCOPES:
            for name in variant or VARIANTS:
                code = f"from benchmarks.incumbent import train; print(train({size_name!r}, {scope!r}, {name!r}, 3))"
                ratios: list[float] = []
                for _ in range(1 if quick else 3):
                    done = subprocess.run(
                        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=1200
                    )
                    if done.returncode:
                        sys.stderr.write(done.stderr[-2000:])
                        break
                    ratios.append(float(done.stdout.splitlines()[-1]))
                line = {"figure": "incumbent", "size": size_name, "scope": scope, "variant": name}
                sys.stdout.write(json.dumps({**line, "ratio": round(median(ratios), 3) if ratios else None}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
