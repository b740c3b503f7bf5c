"""What the probe recorded of a run, as numbers by name."""

from __future__ import annotations

from pathlib import Path

from trainprobe.engine.dumps.log import read_log


def recorded(output: Path, rank: int = 0) -> dict[int, dict[str, float]]:
    """Return step → scalars, and "name slot" → norm of each parameter's value, gradient and state."""
    steps: dict[int, dict[str, float]] = {}
    for reel in read_log(output / f"rank{rank}"):
        told = steps.setdefault(reel.step, dict(reel.scalars))
        for record in reel.records():
            if record.site.kind == "parameter" and "norm" in record.values:
                told[f"{record.site.name.removeprefix('net.')} {record.site.slot}"] = record.values["norm"]
    return steps
