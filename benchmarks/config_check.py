"""What config_check costs a micro-step: fingerprints and statistics of all weights and of the data, each micro-step collected.

Two equal trainings run in one process, one of them captured at every micro-step, and take single steps in turn: off, on, off.
`ratio` is the median of on / mean of both off, with its 95 % bootstrap interval, in CPU time of the training thread; a slow
drift of the machine cancels out. `writer` is the CPU time of the writing thread for a collected micro-step, as a share of a
step, and `cost` is both together. `noise` is the median of second off / first off: what the method sees where there is nothing
to see. `own_share` is the CPU time of the capture itself, called alone, until it is JSON. `first_step_s` is what the first
micro-step costs beyond a common one, once a capture. `load` is that of the machine. One JSON line a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.interleaved import median_ratio
from benchmarks.models import SIZES, Training, prepare
from trainprobe import ConfigChecker
from trainprobe.config_check.capture.dataset import capture_inputs
from trainprobe.config_check.capture.weights import capture_weights
from trainprobe.config_check.pack_writer import to_json

CAPTURES = {"weights + dataset": ["weights", "dataset"], "all six": None}


class Taker:
    """Takes single steps of a training and keeps their losses."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.losses: list[float] = []

    def step(self) -> float:
        """Return the CPU seconds of this thread for one step; garbage of other steps is not its cost."""
        gc.collect()
        begin = time.thread_time()
        self.losses.append(float(self.training.step(len(self.losses))))
        return time.thread_time() - begin


@dataclass(slots=True)
class Times:
    """CPU seconds of single steps, and of the writing thread."""

    offs: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    ons: list[float] = field(default_factory=list[float])
    firsts: list[float] = field(default_factory=list[float])
    written: float = 0.0


def capture_once(off: Taker, on: Taker, captures: str, rounds: int, times: Times) -> None:
    """Capture `rounds` micro-steps and a first one of the second training, between steps of the first."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"micro_steps": rounds + 2, "on_error": "raise"}
        if CAPTURES[captures]:
            options["captures"] = CAPTURES[captures]
        else:
            ConfigChecker.apply_patches(**options)
        before = set(threading.enumerate())
        with ConfigChecker(on.training.model, output_zip_path=Path(folder) / "pack.zip", **options):
            times.firsts.append(on.step())
            off.step(), on.step()
            (writer,) = set(threading.enumerate()) - before
            clock = time.pthread_getcpuclockid(writer.ident or 0)
            written = time.clock_gettime(clock)
            for _ in range(rounds):
                early = off.step()
                times.ons.append(on.step())
                times.offs.append((early, off.step()))
            times.written += time.clock_gettime(clock) - written


def measure(chosen: argparse.Namespace) -> dict[str, object]:
    """Train two equal models in turn, one of them captured at every step, in `repeats` captures."""
    size = replace(SIZES[chosen.size], batch=chosen.batch or SIZES[chosen.size].batch)
    off, on = (Taker(prepare(size, "whole step")) for _ in range(2))
    times = Times()
    for taker in (off, on, off, on):  # caches, memory and the optimizer's first allocations
        taker.step()
    for _ in range(chosen.repeats):
        capture_once(off, on, chosen.captures, chosen.rounds, times)
    common = statistics.median(e for pair in times.offs for e in pair)
    written = times.written / len(times.ons) / common
    ratio = median_ratio(times.ons, [sum(pair) / 2 for pair in times.offs])
    noise = median_ratio([late for _, late in times.offs], [early for early, _ in times.offs])
    return {
        "size": chosen.size,
        "tokens": size.batch * size.shape.context,
        "captures": chosen.captures,
        "parameters": sum(p.numel() for p in on.training.model.parameters()),
        "rounds": len(times.ons),
        "step_cpu_s": round(common, 4),
        "ratio": round(ratio.median, 4),
        "low": round(ratio.low, 4),
        "high": round(ratio.high, 4),
        "writer": round(written, 4),
        "cost": round(ratio.median - 1 + written, 4),
        "noise": [round(noise.median, 4), round(noise.low, 4), round(noise.high, 4)],
        "own_share": round(own_share(on.training.model, common), 4),
        "first_step_s": round(statistics.median(times.firsts) - common, 3),
        "load": round(os.getloadavg()[0], 1),
        "losses_equal": off.losses[: len(on.losses)] == on.losses[: len(off.losses)],
    }


def own_share(model: torch.nn.Module, step: float) -> float:
    """Return the CPU time of one capture of weights and data, until it is JSON, as a share of a step's; median of 15."""
    batch = torch.zeros(4, 256, dtype=torch.int64)
    times: list[float] = []
    for _ in range(15):
        begin = time.process_time()
        weights, data = capture_weights([model], 0), capture_inputs(model.forward, (batch,), {}, 0)
        to_json(weights()), to_json(data())
        times.append(time.process_time() - begin)
    return sorted(times)[7] / step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="real")
    parser.add_argument("--batch", type=int, help="sequences of a micro-batch, by default those of the size")
    parser.add_argument("--captures", choices=list(CAPTURES), default="weights + dataset")
    parser.add_argument("--rounds", type=int, default=20, help="collected micro-steps of one capture")
    parser.add_argument("--repeats", type=int, default=5, help="captures of one run")
    parser.add_argument("--runs", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(chosen.runs):
        print(json.dumps(measure(chosen)), flush=True)


if __name__ == "__main__":
    main()
