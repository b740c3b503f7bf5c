"""The time of a training step with the tool, as a ratio to the same step without, interleaved.

`floor` is the ratio that no tool can be below which reads what this plan looks at once: the bytes of a step's values over the
bandwidth of a copy on the same device. `refusals` says where the device's kernels are not used, and why.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

import trainprobe
from benchmarks.gpu.machine import Machine, copy_bandwidth, prepare
from benchmarks.interleaved import median_ratio
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.core.records import StepData
from trainprobe.engine.plan.defaults import default_plan

EVERY = {"activations": True, "activation_gradients": True, "parameters": True, "gradients": True, "optimizer_state": True}
# name → plan, and the highest ratio on the 124M model that is good enough
VARIANTS: dict[str, tuple[Mapping[str, Any], float]] = {
    "default plan": (default_plan(), 1.02),
    "idle": ({"level": "mix", "step": [10**9]}, 1.01),
    "monitor of everything": ({"level": "off", "monitor": EVERY}, 1.03),
    "L0": ({"level": "L0"}, 1.05),
    "L1": ({"level": "L1"}, 1.5),
    "mix": ({"level": "mix"}, 1.5),
    "L1 checksum": ({"level": "L1", "summary": "checksum"}, 1.5),
}


def figures(machine: Machine) -> Any:
    """Yield a line for each size and variant; one that fails says so, and the others are measured."""
    block, pairs = (1, 1) if machine.rehearse else (4, 7)
    bandwidth = copy_bandwidth(machine)
    for size in ("124M", "launch-bound"):
        steps = block if size == "124M" or machine.rehearse else 10 * block
        bare = Side(machine, size, steps)
        for name, (plan, bar) in VARIANTS.items():
            folder = Path(tempfile.mkdtemp(prefix="trainprobe_gpu_"))
            about = {"figure": "overhead", "size": size, "variant": name}
            try:
                yield {**about, **measured(bare, machine, plan, folder, pairs, bar, bandwidth)}
            except Exception as error:  # noqa: BLE001  (of any sort: the other variants tell what they can)
                yield {**about, "error": f"{type(error).__name__}: {error}"[:500], "met": False}
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        del bare


class Side:
    """One of two equal trainings, run in blocks of steps that are timed by the device's events and by the clock."""

    def __init__(self, machine: Machine, size: str, steps: int) -> None:
        self.machine, self.size, self.steps = machine, size, steps
        self.training = prepare(machine, size, "bf16")
        self.probe: Any = None
        self.done = 0

    def run(self) -> tuple[float, float]:
        """Run a block and return (seconds of the device's stream, seconds by the clock until the device is done), a step."""
        self.machine.wait()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.machine.device == "cuda" else []
        begun = time.perf_counter()
        if events:
            events[0].record()
        for _ in range(self.steps):
            if self.probe is None:
                self.training.step(self.done)
            else:
                with self.probe.step():
                    self.training.step(self.done)
            self.done += 1
        if events:
            events[1].record()
        self.machine.wait()
        wall = time.perf_counter() - begun
        device = events[0].elapsed_time(events[1]) / 1e3 if events else wall
        return device / self.steps, wall / self.steps


def measured(
    bare: Side, machine: Machine, plan: Mapping[str, Any], folder: Path, pairs: int, bar: float, bandwidth: float
) -> dict[str, Any]:
    """Return the ratios of interleaved blocks, off, on, on, off, and the peaks of memory. bandwidth: bytes a second."""
    on = Side(machine, bare.size, bare.steps)
    options = {"console": False, "on_error": "raise", **plan, "output": str(folder / "out")}
    with trainprobe.watch(on.training.model, on.training.optimizer, options) as probe:
        on.probe = probe
        looked: list[int] = []
        probe.watchers.append(lambda step_data: looked.append(bytes_of(step_data)) or ())
        for side in (bare, on, bare, on):
            side.run()
        offs, ons, peaks = [], [], {"off": 0, "on": 0}
        for pair in range(pairs):
            for side in (bare, on) if pair % 2 == 0 else (on, bare):
                if machine.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                (offs if side is bare else ons).append(side.run())
                if machine.device == "cuda":
                    peaks["off" if side is bare else "on"] = torch.cuda.max_memory_allocated()
        begun = time.perf_counter()
        probe.flush()
        behind = time.perf_counter() - begun
    ratios = {
        name: {key: round(value, 4) for key, value in asdict(median_ratio([s[k] for s in ons], [s[k] for s in offs])).items()}
        for k, name in enumerate(("device", "wall"))
    }
    bare_s = sorted(s[1] for s in offs)[len(offs) // 2]
    most = sorted(looked)[len(looked) // 2] if looked else 0
    return {
        **ratios,
        "floor": round(1 + most / bandwidth / bare_s, 4),
        "looked_bytes": most,
        "copy_GB/s": round(bandwidth / 1e9, 1),
        "bare_ms": round(1e3 * bare_s, 3),
        "refusals": [*TorchLibrary().faults()],
        "writer_behind_s": round(behind, 2),
        "peak_bytes": peaks,
        "bar": bar,
        "met": ratios["wall"]["median"] <= bar if bare.size == "124M" and not machine.rehearse else None,
    }


def bytes_of(step_data: StepData) -> int:
    """Return the bytes of all values of a step whose numbers are known, each once."""
    sizes = {value.row: math.prod(value.shape) * _item_size(value.dtype) for value in step_data.values if value.row >= 0}
    return sum(sizes.values())


@cache
def _item_size(dtype: str) -> int:
    return getattr(torch, dtype.rpartition(".")[2]).itemsize
