"""What writing the run log costs: CPU a step of the table and of the text (`records.jsonl`), written by turns.

    python -m benchmarks.run_log [--steps 320] [--rounds 5] [--batch 36] [--keep DIR]
    python -m benchmarks.run_log --against OTHER_CHECKOUT

The steps are those of a training like the demo's: its layers, features, micro-batches and dumped steps, with fewer numbers in
each tensor, as only the sinks are timed. Each round writes all of them with each sink, layouts anew. CPU is of the whole
process, all threads. `--against` writes them with the package of another checkout too, by turns, each round in a process of
its own. `--keep` names a folder in which the steps stay for the next call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainprobe.engine.core.records import Place, StepData
from trainprobe.engine.core.step_layout import StepLayout, layout_of
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.sinks import jsonl, parquet

ROOT = Path(__file__).resolve().parent.parent


def train(folder: Path, steps: int) -> None:
    """Write the steps of a training like the demo's into a folder, as text, which holds all that a sink is given."""
    import torch

    from trainprobe import watch
    from trainprobe.demo.corpus import draw_batch, read_corpus
    from trainprobe.demo.gpt import GPT, Shape
    from trainprobe.demo.training import FEATURES, update

    torch.manual_seed(0)
    shape = Shape(width=32, context=16)
    model, corpus = GPT(shape), read_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    plan = {
        "output": folder,
        "monitor": {"activation_gradients": True, "batches": True, "features": FEATURES},
        "step": (steps // 10, steps - 1),
        "level": "mix",
        "summary": "both",
        "sinks": ("jsonl",),
    }
    with watch(model, optimizer, plan) as probe:
        for step in range(steps):
            inputs, targets = map(torch.from_numpy, draw_batch(corpus, step, 2, shape.context))
            with probe.step(step):
                probe.note("loss", update(model, optimizer, inputs, targets))


def begin_anew(steps: Sequence[StepData]) -> None:
    """Forget what was worked out of the layouts, as in a run that begins."""
    anew: dict[StepLayout, StepLayout] = {}
    for step_data in steps:
        step_data.layout = anew.setdefault(layout_of(step_data), StepLayout())


def write_table(folder: Path, steps: Sequence[StepData], batch: int) -> None:
    """Write all steps with the sink `parquet`, so many in a batch."""
    sink = parquet.open(folder, Plan(output=folder, sinks=("parquet",)), Place())
    for number, step_data in enumerate(steps, 1):
        sink.write(step_data)
        if number % batch == 0:
            sink.flush()
    sink.close()


def write_text(folder: Path, steps: Sequence[StepData], batch: int) -> None:
    """Write all steps with the sink `jsonl`."""
    sink = jsonl.open(folder, Plan(output=folder, sinks=("jsonl",)), Place())
    for step_data in steps:
        sink.write(step_data)
    sink.close()


def cost(write: Callable[[Path, Sequence[StepData], int], None], steps: Sequence[StepData], batch: int) -> tuple[float, int]:
    """Return milliseconds of CPU and bytes a step."""
    begin_anew(steps)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write(Path(folder), steps, batch)
        spent = time.process_time() - began
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return 1e3 * spent / len(steps), size // len(steps)


def rounds(run: Path, count: int, batch: int) -> dict[str, list[tuple[float, int]]]:
    """Return what the table and the text cost in each of some rounds, after one that warms up."""
    steps = list(read_log(run))
    gc.collect()
    gc.freeze()  # a training has few steps in memory: the collector is not to walk through all of them
    sinks = {"table": write_table, "text": write_text}
    for write in sinks.values():
        cost(write, steps, batch)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sinks}
    for number in range(count):
        for name in list(sinks)[:: 1 if number % 2 else -1]:
            found[name].append(cost(sinks[name], steps, batch))
    return found


def in_process(checkout: Path, run: Path, batch: int) -> dict[str, list[tuple[float, int]]]:
    """Return one round with the package of a checkout."""
    command = [sys.executable, str(Path(__file__)), "--keep", str(run), "--rounds", "1", "--batch", str(batch), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return json.loads(subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, check=True).stdout)


def told(name: str, found: Sequence[tuple[float, int]]) -> str:
    """Return one line for the reader."""
    spent = [each for each, _ in found]
    return f"{name}: {statistics.median(spent):.3f} ms a step ({min(spent):.3f} to {max(spent):.3f}), {found[-1][1]:,} bytes"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=36, help="steps that are written at once; 36 of the demo are 16,000 values"
    )
    parser.add_argument("--keep", type=Path, help="folder for the steps, which are made where it has none")
    parser.add_argument("--against", type=Path, help="another checkout of trainprobe")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run = asked.keep or Path(made)
        if not list(run.glob("rank*")):
            train(run, asked.steps)
        if asked.against is None:
            found = rounds(run, asked.rounds, asked.batch)
        else:
            found = {}
            for number in range(asked.rounds):
                for checkout in (ROOT, asked.against)[:: 1 if number % 2 else -1]:
                    for name, costs in in_process(checkout.resolve(), run.resolve(), asked.batch).items():
                        found.setdefault(name if checkout == ROOT else f"{name}, {checkout}", []).extend(costs)
    print(json.dumps(found) if asked.json else "\n".join(told(*each) for each in sorted(found.items())))


if __name__ == "__main__":
    main()
