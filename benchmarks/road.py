"""The road of one value from the hook to the disk: Python calls of the package for each further value of a step, and files.

    python -m benchmarks.road

Two models of one width and unequal depth train under the same plan (statistics, a dump). All Python calls of the package in
one collected step are counted with `sys.setprofile`, in the training's thread and in the writer's; the difference between the
two models, divided by how many values more the deeper one has, is what a value costs. Prints one JSON line a level.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainprobe

PACKAGE = f"{Path(trainprobe.__file__).parent}/"
SHALLOW, DEEP, STEPS = 8, 40, 4
LEVELS = ("L0", "L1", "mix")


def counted(layers: int, level: str) -> tuple[Counter[str], int]:
    """Return the calls of the last of a few steps by file and function, and how many values that step has."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: Counter[str] = Counter()
    counting: list[bool] = []
    values: list[int] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        where = frame.f_code.co_filename
        if counting and event == "call" and where.startswith(PACKAGE):
            calls[f"{where.removeprefix(PACKAGE)}:{frame.f_code.co_name}"] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan = {"output": folder, "level": level, "task": "statistics", "stacks": False, "console": False}
            with trainprobe.watch(model, optimizer, plan) as probe:
                probe.watchers.append(lambda step_data: values.append(len(step_data.values)) or ())
                for step in range(STEPS):
                    if step == STEPS - 1:
                        probe.flush()
                        counting.append(True)
                    with probe.step():
                        optimizer.zero_grad()
                        model(torch.ones(4, 8)).sum().backward()
                        optimizer.step()
                probe.flush()
                counting.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls, values[-1]


def road(level: str) -> dict[str, Any]:
    """Return the Python calls that one further value of a step costs at a level, and the files in which they are."""
    (shallow, few), (deep, many) = counted(SHALLOW, level), counted(DEEP, level)
    least = (DEEP - SHALLOW) / 4  # a thread that waits once more is no cost of a value
    more = {name: n - shallow[name] for name, n in deep.items() if n - shallow[name] > least}
    return {
        "figure": "road",
        "level": level,
        "calls_a_value": round(sum(more.values()) / (many - few), 2),
        "files": sorted({name.partition(":")[0] for name in more}),
        "calls_a_step": sum(shallow.values()),
        "values": [few, many],
    }


def main() -> None:
    """Print the calls and the files a value."""
    for level in LEVELS:
        sys.stdout.write(json.dumps(road(level)) + "\n")


if __name__ == "__main__":
    main()
