"""How long `trainprobe why` takes on 4,096 ranks × 40,000 steps, of which one rank has the cause.

python -m benchmarks.why.fleet FOLDER [--ranks 4096 --steps 40000]

One rank's log is written by the real sink; the others have the same bytes under hard links, as replicas have. Every rank but
one found a spike, and that one found a step before that its weights left those of its replicas. Prints CPU seconds.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated

import orjson
import typer

from benchmarks.fleet import Fleet
from trainprobe.again.why.why import answer, left_by
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.layout import FINDINGS_FILE, log_folder
from trainprobe.engine.storage.sinks import parquet


def write(folder: Path, ranks: int, steps: int) -> None:
    """Write the fleet."""
    fleet = Fleet(1, 1, 1, steps, parameters=4, activations=2)
    sink = parquet.open(folder, Plan(output=folder, on_existing="replace", sinks=("parquet",)), fleet.place(0))
    for step in range(steps):
        sink.write(fleet.step_data(0, step))
        if step % 1000 == 999:
            sink.flush()
    sink.close()
    first = log_folder(folder, 0)
    for rank in range(ranks):
        there = log_folder(folder, rank)
        there.mkdir(exist_ok=True)
        for path in first.iterdir() if rank else ():
            os.link(path, there / path.name)
    for rank in range(ranks):
        odd = rank == ranks // 3
        rule, step, name = ("replicas", steps - 2000, "layers.0.weight3") if odd else ("spike", steps - 1999, "loss")
        site = Site("parameter" if odd else "scalar", name, "value")
        found = Finding(rule, "error" if odd else "warning", f"{rule} of {name}", step, Place(rank, ranks), site)
        line = orjson.dumps(dataclasses.asdict(found), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        (log_folder(folder, rank) / FINDINGS_FILE).write_bytes(line)


def main(
    folder: Path,
    ranks: Annotated[int, typer.Option(help="how many")] = 4096,
    steps: Annotated[int, typer.Option(help="of each rank")] = 40_000,
) -> None:
    """Write the fleet where it is not there, and ask why."""
    if not folder.exists():
        folder.mkdir()
        write(folder, ranks, steps)
    began = time.process_time()
    causes, _ = answer(left_by(folder))
    spent = time.process_time() - began
    size = sum(path.stat().st_size for path in log_folder(folder, 0).iterdir())
    print(f"{ranks} ranks × {steps} steps, {size * ranks / 1e9:.1f} GB of logs: {spent:.1f} s of CPU")
    for cause in causes:
        print(f"  {cause.what}: {cause.sentence}; {'; '.join(cause.evidence)}")


if __name__ == "__main__":
    typer.run(main)
