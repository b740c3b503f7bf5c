"""What each rule of the monitor costs a step, on the thread that trains.

    python -m benchmarks.rules [--size tiny] [--steps 30]

A GPT trains under the default plan of the integrations, each step after a bare one of a second training. The rules first look
at copies of its third step, with noise, until each has what it needs to judge. CPU of the rule's own calls, median, in
microseconds a step, and as a share of the bare step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
import typer

import trainprobe
from benchmarks.models import SIZES, prepare
from benchmarks.monitor import DEFAULT
from trainprobe.monitor.frames import Frame

KNOWN = 160  # steps that the rules have seen before the clock runs: more than any of them remembers


def timed(check: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return a function that also keeps how long each call took, in seconds of its thread."""

    def called(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return check(*arguments)
        finally:
            spent.append(time.thread_time() - began)

    return called


def measure(size_name: str, steps: int) -> tuple[dict[str, list[float]], list[float], int]:
    """Return rule → seconds of each step, seconds of the bare steps, and how many series a step has."""
    bare, seen = (prepare(SIZES[size_name], "whole step") for _ in range(2))
    spent: dict[str, list[float]] = defaultdict(list)
    alone: list[float] = []
    noise = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        trainprobe.watch(seen.model, seen.optimizer, level="off", output=folder, console=False, monitor=DEFAULT) as probe,
    ):
        assert probe.monitor is not None
        watcher = probe.monitor.watcher
        frames: list[Frame] = []
        judge = watcher.judge
        watcher.judge = lambda frame: frames.append(frame) or judge(frame)
        for step in range(3):
            with probe.step(step):
                probe.note("loss", seen.step(step))
        for step in range(3, 3 + KNOWN):
            factors = np.exp(0.05 * noise.standard_normal(frames[2].values.shape))
            judge(replace(frames[2], step=step, values=frames[2].values * factors))
        for name, check in watcher._checks.items():
            watcher._checks[name] = timed(check, spent[name])
        for step in range(3 + KNOWN, 3 + KNOWN + steps):
            began = time.thread_time()
            bare.step(step)
            alone.append(time.thread_time() - began)
            with probe.step(step):
                probe.note("loss", seen.step(step))
        return spent, alone, frames[2].values.size


def main(
    size: Annotated[list[str] | None, typer.Option(help="real, tiny")] = None,
    steps: Annotated[int, typer.Option(help="that are measured")] = 30,
) -> None:
    """Print a line for each rule, the costliest first."""
    torch.set_num_threads(1)
    for size_name in size or SIZES:
        spent, alone, series = measure(size_name, steps)
        step = statistics.median(alone)
        print(f"{size_name}: {series} series, a bare step takes {1e3 * step:.1f} ms of CPU")
        middle = {name: statistics.median(each) for name, each in spent.items()}
        for name in sorted(middle, key=middle.__getitem__, reverse=True):
            ordered = sorted(spent[name])
            low, high = 1e6 * ordered[len(ordered) // 10], 1e6 * ordered[9 * len(ordered) // 10]
            share = middle[name] / step
            print(f"  {name:16} {1e6 * middle[name]:7.0f} us ({low:.0f} to {high:.0f}), {share:.3%} of the bare step")
        print(f"  all together     {1e6 * sum(middle.values()):7.0f} us, {sum(middle.values()) / step:.3%}")


if __name__ == "__main__":
    typer.run(main)
