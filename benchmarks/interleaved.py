"""Interleaved A/B timing in one process: off, on, on, off, … and the median ratio with its bootstrap interval.

A shared machine drifts by tens of per cent within a minute. Blocks of both kinds therefore alternate, each ratio is
formed from neighbours in time, and the median over pairs is reported. CPU time of the whole process (all threads, the
writer's included) is the figure; wall time stands beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds of one block: CPU time of all it caused, wall time of its steps, wall time until all was on disk."""

    cpu: float
    wall: float
    wall_drained: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio on / off over pairs, with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def clock(block: Callable[[], object], drain: Callable[[], object]) -> Clocks:
    """Run one block of steps, then wait with `drain` until background work it caused is done."""
    gc.collect()  # garbage of the previous block is not this block's cost
    wall, cpu = time.perf_counter(), time.process_time()
    block()
    steps_done = time.perf_counter()
    drain()
    return Clocks(time.process_time() - cpu, steps_done - wall, time.perf_counter() - wall)


def alternate(
    off: Callable[[], object],
    on: Callable[[], object],
    drain: Callable[[], object],
    pairs: int,
    *,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> tuple[list[Clocks], list[Clocks]]:
    """Time `pairs` pairs of blocks in the order off, on, on, off, … after `warmup` untimed blocks of each kind.

    `before` runs ahead of every pair, outside the clocks.
    """
    for _ in range(warmup):
        off()
        on()
        drain()
    offs: list[Clocks] = []
    ons: list[Clocks] = []
    for pair in range(pairs):
        before()
        for kind in ("off", "on") if pair % 2 == 0 else ("on", "off"):
            if kind == "off":
                offs.append(clock(off, lambda: None))
            else:
                ons.append(clock(on, drain))
    return offs, ons


def median_ratio(on: list[float], off: list[float], seed: int = 0, draws: int = 2000) -> Ratio:
    """Return the median of the pairwise ratios and the 2.5 and 97.5 percentiles of its bootstrap (Efron, 1979)."""
    ratios: npt.NDArray[np.float64] = np.asarray(on) / np.asarray(off)
    picks = np.random.default_rng(seed).integers(0, ratios.size, size=(draws, ratios.size))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))
