"""What it takes to judge and to show a long run: 10,000 steps of 3,500 series, written as columns.

    python -m benchmarks.long_run [--steps 10000] [--values 875]

The run is made up: each value has a norm, an absmax, a mean and a share of zeros, which drift and shake, and one spikes.
CPU seconds, clock and largest memory of each command, which runs in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trainprobe.engine.core.records import Call, Place, StepData, Value
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.sinks import parquet


def write(folder: Path, steps: int, values: int) -> float:
    """Write the run and return CPU seconds."""
    rng = np.random.default_rng(0)
    shown = [Value(i, "torch.float32", (1024, 1024)) for i in range(values)]
    calls: list[Call] = []
    for i, value in enumerate(shown):
        call = Call("state", f"layers.{i // 7}.weight{i % 7}", 0, "optimizer", micro=0)
        call.params = {"grad": value}
        calls.append(call)
    scale = np.exp(rng.normal(size=values))
    sink = parquet.open(folder, Plan(output=folder, sinks=("parquet",)), Place())
    before = time.process_time()
    for step in range(steps):
        partials = np.zeros((values, len(PARTIALS)))
        norm = scale * np.exp(0.02 * rng.normal(size=values)) * (1 + 10 / (step + 10))
        if step == steps // 2:
            norm[values // 3] *= 300
        partials[:, 0] = 1 << 20
        partials[:, 5], partials[:, 6] = np.float32(-norm), np.float32(norm)
        partials[:, 7], partials[:, 8] = rng.normal(size=values), norm * norm
        step_data = StepData(
            step, Place(), "pytorch", "off", "statistics", calls, shown, partials, scalars={"loss": 2 + 8 / (step + 1)}
        )
        sink.write(step_data)
        if step % 16 == 15:
            sink.flush()
    sink.close()
    return time.process_time() - before


def measured(*command: str) -> tuple[float, float, float, int]:
    """Return CPU seconds, seconds on the clock, largest memory in MB, and the exit code of a command of trainprobe."""
    program = (
        "import resource, sys\nfrom trainprobe.cli import main\ncode = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, code, file=sys.stderr)"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    seconds, memory, code = done.stderr.split()[-3:]
    return float(seconds), time.perf_counter() - begin, float(memory), int(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--values", type=int, default=875)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = write(folder, chosen.steps, chosen.values)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        each = f"{1e3 * seconds / chosen.steps:.2f} ms and {size / chosen.steps / 1e3:.1f} kB a step"
        print(f"written in {seconds:.1f} CPU s, {each}")
        for command in (["runs", name], ["judge", name], ["report", name, "--output", f"{name}/page.html"]):
            seconds, clock, memory, code = measured(*command)
            print(f"{command[0]}: {seconds:.1f} CPU s, {clock:.1f} s, {memory:.0f} MB, exit code {code}")
        print(f"page: {(folder / 'page.html').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
