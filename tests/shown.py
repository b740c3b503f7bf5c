"""What a dump and a monitor's log show of parameters, step by step: read without any framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.dumps import read_log

Numbers = dict[str, dict[str, float]]


def entries(output: Path, step: int) -> dict[str, Any]:
    """Return the entries of a step's dump on rank 0."""
    return json.loads((output / f"step{step}" / "rank0" / "dump.json").read_text())["data"]


def forward_parameters(data: Mapping[str, Any], cls: str, prefix: str) -> dict[str, float]:
    """Return name → the largest element of each parameter that forward calls of a class were recorded with."""
    return {
        f"{key.split(f'.{cls}.')[0].removeprefix(prefix)}.{name}": leaf["Max"]
        for key, entry in data.items()
        if ".forward." in key
        for name, leaf in entry.get("parameters", {}).items()
    }


def states(output: Path) -> dict[int, Numbers]:
    """Return step → name of a parameter → slot → the largest element of what was recorded there."""
    steps: dict[int, Numbers] = {}
    for step_data in read_log(output / "rank0"):
        largest, seen = step_data.numbers()["max"], steps.setdefault(step_data.step, {})
        for call in (c for c in step_data.calls if c.kind == "state"):
            seen.setdefault(call.name, {}).update({slot: float(largest[v.row]) for slot, v in call.params.items()})
    return steps
