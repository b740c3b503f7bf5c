"""What config_check costs a micro-step: fingerprints and statistics of all weights and of the data, each micro-step collected.

Prints one JSON line: the median ratio of CPU time with and without, its interval, whether losses kept their bits, and what the
first micro-step cost beyond a common one (structure, environment and packages, once a run). `own_share` is the CPU time of the
capture itself as a share of a step, which a busy machine disturbs less than the ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.interleaved import alternate, median_ratio
from benchmarks.models import SIZES, prepare
from trainprobe import ConfigChecker
from trainprobe.config_check.capture.dataset import capture_inputs
from trainprobe.config_check.capture.weights import capture_weights
from trainprobe.config_check.pack_writer import to_json

CAPTURES = {"weights + dataset": ["weights", "dataset"], "all six": None}


def measure(size: str, captures: str, pairs: int) -> dict[str, object]:
    """Train two equal models in turn, one of them captured at every step."""
    bare, watched = prepare(SIZES[size], "whole step"), prepare(SIZES[size], "whole step")
    block = SIZES[size].block
    losses: dict[str, list[float]] = {"off": [], "on": []}
    counts = {"off": 0, "on": 0}

    def steps(kind: str) -> None:
        training = bare if kind == "off" else watched
        for _ in range(block):
            losses[kind].append(float(training.step(counts[kind])))
            counts[kind] += 1

    with tempfile.TemporaryDirectory() as folder:
        options = {"micro_steps": 10**6, "on_error": "raise"}
        if CAPTURES[captures]:
            options["captures"] = CAPTURES[captures]
        else:
            ConfigChecker.apply_patches(**options)
        checker = ConfigChecker(watched.model, output_zip_path=Path(folder) / "pack.zip", **options)
        begin = time.process_time()
        steps("on")
        first = time.process_time() - begin
        steps("off")
        offs, ons = alternate(lambda: steps("off"), lambda: steps("on"), lambda: None, pairs)
        cpu = median_ratio([c.cpu for c in ons], [c.cpu for c in offs])
        wall = median_ratio([c.wall for c in ons], [c.wall for c in offs])
        checker.close()
    return {
        "size": size,
        "captures": captures,
        "parameters": sum(p.numel() for p in bare.model.parameters()),
        "ratio": round(cpu.median, 4),
        "low": round(cpu.low, 4),
        "high": round(cpu.high, 4),
        "wall": round(wall.median, 4),
        "first_block_cpu_s": round(first, 3),
        "block_cpu_s": round(sorted(c.cpu for c in offs)[len(offs) // 2], 3),
        "own_share": round(own_share(watched.model, offs[len(offs) // 2].cpu / block), 4),
        "losses_equal": losses["off"] == losses["on"],
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
    parser.add_argument("--captures", choices=list(CAPTURES), default="weights + dataset")
    parser.add_argument("--pairs", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(chosen.size, chosen.captures, chosen.pairs)))


if __name__ == "__main__":
    main()
