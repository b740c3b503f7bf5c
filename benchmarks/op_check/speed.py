"""Print what judging a step costs: `python -m benchmarks.op_check.speed [--width N] [--layers N] [--profile]`.

A GPT trains a step in float32; its dump of tensors is judged in one thread. The ratio is that of CPU times: judging the whole
dump, to the forward, backward and update that it holds. Then steps are judged while it trains, each after one that is not.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

import trainprobe
from trainprobe.demo.gpt import GPT, Shape
from trainprobe.op_check.dump import check_dump, rank_folders

TURNS = 5


def cpu_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--width", type=int, default=256)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--length", type=int, default=128)
    asked.add_argument("--batch", type=int, default=4)
    asked.add_argument("--profile", action="store_true", help="print where the time goes")
    options = asked.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(layers=options.layers, width=options.width, context=options.length)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randint(0, 256, (options.batch, options.length))

    def step() -> None:
        functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    bare = min(cpu_time(step) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"level": "mix", "task": "tensor", "output": folder, "console": False, "sinks": ["dump"]}
        with trainprobe.watch(model, optimizer, **settings) as probe, probe.step():
            step()
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        start = time.process_time()
        found = check_dump(rank_folders(Path(folder)))
        judged = time.process_time() - start
        profile.disable()
    print(f"{len(found.rows)} calls: a step takes {bare:.3f} s, judging it {judged:.2f} s of CPU: {judged / bare:.1f} times")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"level": "off", "output": folder, "console": False, "op_check": {"step": [*range(TURNS)]}}
        with trainprobe.watch(model, optimizer, **settings) as probe:

            def watched() -> None:
                with probe.step():
                    step()

            turns = [(cpu_time(step), cpu_time(watched)) for _ in range(TURNS)]
    ratio = statistics.median(within / alone for alone, within in turns)
    within = statistics.median(within for _, within in turns)
    print(f"a judged step of a training takes {within:.2f} s of CPU: {ratio:.1f} times the step before it, median of {TURNS}")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


main()
