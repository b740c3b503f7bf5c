"""The time of a training step with the tool, as a ratio to the same step without, interleaved."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import trainprobe
from benchmarks.gpu.machine import Machine, prepare
from benchmarks.interleaved import median_ratio
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
    """Yield a line for each size and variant."""
    block, pairs = (1, 1) if machine.rehearse else (4, 7)
    for size in ("124M", "launch-bound"):
        steps = block if size == "124M" or machine.rehearse else 10 * block
        bare = Side(machine, size, steps)
        for name, (plan, bar) in VARIANTS.items():
            folder = Path(tempfile.mkdtemp(prefix="trainprobe_gpu_"))
            try:
                yield {"figure": "overhead", "size": size, "variant": name, **measured(bare, machine, plan, folder, pairs, bar)}
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


def measured(bare: Side, machine: Machine, plan: Mapping[str, Any], folder: Path, pairs: int, bar: float) -> dict[str, Any]:
    """Return the ratios of interleaved blocks, off, on, on, off, and the peaks of memory."""
    on = Side(machine, bare.size, bare.steps)
    options = {"console": False, "on_error": "raise", **plan, "output": str(folder / "out")}
    with trainprobe.watch(on.training.model, on.training.optimizer, options) as probe:
        on.probe = probe
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
    return {
        **ratios,
        "bare_ms": round(1e3 * sorted(s[1] for s in offs)[len(offs) // 2], 3),
        "writer_behind_s": round(behind, 2),
        "peak_bytes": peaks,
        "bar": bar,
        "met": ratios["wall"]["median"] <= bar if bare.size == "124M" and not machine.rehearse else None,
    }
