"""What the probe recorded of a run, as numbers by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainprobe.engine.core.records import StepData
from trainprobe.engine.storage.dumps import read
from trainprobe.engine.storage.dumps.layout import find_ranks, find_steps
from trainprobe.engine.storage.dumps.log import read_log
from trainprobe.monitor.run_folder import find_logs


def steps_of(output: Path, rank: int = 0) -> Iterator[StepData]:
    """Yield the steps of a run's log or, where nothing but dumps was asked for, of its dumps."""
    if find_logs(output / f"rank{rank}"):
        yield from read_log(output / f"rank{rank}")
        return
    for folder in find_steps(output).values():
        yield read(find_ranks(folder)[rank])


def recorded(output: Path, rank: int = 0) -> dict[int, dict[str, float]]:
    """Return step → scalars, and "name slot" → norm of each parameter's value, gradient and state."""
    steps: dict[int, dict[str, float]] = {}
    for step_data in steps_of(output, rank):
        told = steps.setdefault(step_data.step, dict(step_data.scalars))
        for record in step_data.records():
            if record.site.kind == "parameter" and "norm" in record.values:
                told[f"{record.site.name.removeprefix('net.')} {record.site.slot}"] = record.values["norm"]
    return steps
