"""The road of one value from the hook to the disk: Python calls of the package for each further value of a step, and files.

    python -m benchmarks.road [--compiled | --stand-in]

Two models of one width and unequal depth train under the same plan (statistics, a dump). All Python calls of the package in
one collected step are counted with `sys.setprofile`, in the training's thread and in the writer's; the difference between the
two models, divided by how many values more the deeper one has, is what a value costs. Prints one JSON line a level.

`--stand-in` (needs g++, and a minute and a half the first time) trains on the stand-in accelerator of `tests/stand_in`, whose
values are reduced on the device and come to the host later.

`--compiled` (a minute; needs gcc and gcov) builds the compiled part with counters and tells in which of its files a function
runs once more for each further layer of each step: `compiled_files` of a forward pass without gradients, where a layer is a
value at L0 and L1 and two at mix, and `compiled_files_of_gradients` for each further layer of a model that is not frozen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainprobe

ROOT = Path(__file__).parents[1]
PACKAGE = f"{Path(trainprobe.__file__).parent}/"
SHALLOW, DEEP, STEPS = 8, 40, 4
LEVELS = ("L0", "L1", "mix")


def counted(layers: int, level: str, trained: int, device: str = "cpu") -> tuple[Counter[str], int]:
    """Return the calls of the last of a few steps by file and function, and how many values that step has.

    trained: how many layers, the last ones, train; the others are frozen. device: of the model.
    """
    torch.manual_seed(0)
    torch.set_grad_enabled(trained > 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))).to(device)
    inputs = torch.ones(4, 8, device=device)
    model[: layers - trained].requires_grad_(False)
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
                        loss = model(inputs).sum()
                        if trained:
                            loss.backward()
                            optimizer.step()
                probe.flush()
                counting.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls, values[-1]


def road(level: str, device: str = "cpu") -> dict[str, Any]:
    """Return the Python calls that one further value of a step costs at a level, and the files in which they are."""
    (shallow, few), (deep, many) = (counted(layers, level, layers, device) for layers in (SHALLOW, DEEP))
    least = (DEEP - SHALLOW) / 4  # a thread that waits once more is no cost of a value
    more = {name: n - shallow[name] for name, n in deep.items() if n - shallow[name] > least}
    return {
        "figure": "road",
        "level": level,
        "device": device,
        "calls_a_value": round(sum(more.values()) / (many - few), 2),
        "files": sorted({name.partition(":")[0] for name in more}),
        "calls_a_step": sum(shallow.values()),
        "values": [few, many],
    }


def built_with_counters(folder: Path) -> Path:
    """Build the package in a folder with gcc's counters and return the folder of the counters."""
    for name in ("trainprobe", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    flags = {"CFLAGS": "--coverage -O0", "LDFLAGS": "--coverage"}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, env={**os.environ, **flags}, check=True, capture_output=True)
    return next((folder / "build").rglob("native/tape.gcno")).parent


def runs(counters: Path, folder: Path, layers: int, level: str, trained: int) -> Counter[tuple[str, str]]:
    """Return how often each function of the compiled part runs in such a training, by file and name."""
    for file in counters.glob("*.gcda"):
        file.unlink()
    program = f"from benchmarks.road import counted; counted({layers}, {level!r}, {trained})"
    path = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env={**os.environ, **path}, check=True)
    found: Counter[tuple[str, str]] = Counter()
    for file in counters.glob("*.gcda"):
        gcov = ["gcov", "--json-format", "--stdout", str(file)]
        told = subprocess.run(gcov, cwd=folder, check=True, capture_output=True).stdout
        for each in (each for line in told.splitlines() for each in json.loads(line)["files"]):
            name = Path(each["file"]).name
            found.update({(name, function["name"]): function["execution_count"] for function in each["functions"]})
    return found


def compiled_road(level: str, folder: Path, counters: Path) -> dict[str, Any]:
    """Return the compiled files that run for each further layer, forward, and for each further layer that trains, backward."""
    untrained, forward = (runs(counters, folder, layers, level, 0) for layers in (SHALLOW, DEEP))
    frozen, backward = (runs(counters, folder, DEEP, level, layers) for layers in (SHALLOW, DEEP))
    return {
        "figure": "compiled road",
        "level": level,
        "compiled_files": _run_more(untrained, forward),
        "compiled_files_of_gradients": _run_more(frozen, backward),
    }


def _run_more(shallow: Counter[tuple[str, str]], deep: Counter[tuple[str, str]]) -> list[str]:
    return sorted({file for (file, of), n in deep.items() if n - shallow[file, of] >= (DEEP - SHALLOW) * STEPS})


def main() -> None:
    """Print the calls and the files a value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true", help="the files of the compiled part; needs gcc and gcov")
    parser.add_argument("--stand-in", action="store_true", help="on the stand-in accelerator; needs g++")
    asked = parser.parse_args()
    if asked.stand_in:
        from tests.stand_in import register

        register()
    if not asked.compiled:
        for level in LEVELS:
            sys.stdout.write(json.dumps(road(level, "npu:0" if asked.stand_in else "cpu")) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        counters = built_with_counters(Path(name))
        for level in LEVELS:
            sys.stdout.write(json.dumps(compiled_road(level, Path(name), counters)) + "\n")


if __name__ == "__main__":
    main()
