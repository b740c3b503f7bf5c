"""What a kill costs the run log: trainings are killed with SIGKILL at random instants, while others keep the machine busy.

    python -m benchmarks.kills [--kills 40] [--busy 2] [--seed 0] [--sink parquet]

Trainings take turns in how long they rest after a step: not at all, 5, 50 and 300 ms. The last kind trains a model of 40
layers, the others one of two. Each tells the end of a step through a pipe, is killed 0.3 to 6 seconds after its first step, and
is read back. A loss in seconds is the time between the end of the first step that is not in the log and the kill. Every other
round has `monitor=True`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KINDS = ((0.0, 2), (0.005, 2), (0.05, 2), (0.3, 40))  # seconds that a step rests, layers


class Kill(NamedTuple):
    """One training and its end. steps, kept: how many ended before the kill, and how many of them are in the log."""

    rest: float
    steps: int
    kept: int
    seconds: float


def train(folder: Path, rest: float, layers: int, sink: str, monitor: bool, pipe: int) -> None:
    """Train without an end; the end of each step goes through a pipe."""
    import torch

    import trainprobe

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with trainprobe.watch(
        model, optimizer, level="L0", sinks=sink.split(","), monitor=monitor, output=folder, console=False
    ) as probe:
        while True:
            with probe.step():
                loss = model(torch.randn(8, 16)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
            os.write(pipe, b"%d %.6f\n" % (probe.step_number, time.time()))
            time.sleep(rest)


def kill_one(
    rest: float, layers: int, sink: str, monitor: bool, after: float, kept: Callable[[Path], set[int]] | None = None
) -> Kill:
    """Kill a training so many seconds after its first step, and read what it left. kept: returns the steps that are there."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = os.pipe()
        given = [folder, str(rest), str(layers), sink, str(int(monitor)), str(theirs)]
        child = subprocess.Popen(
            [sys.executable, "-P", __file__, "--train", *given],  # a package of others may be named `benchmarks`, too
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
            pass_fds=[theirs],
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        told = os.read(ours, 1 << 16)
        ends = time.monotonic() + after
        os.set_blocking(ours, False)
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
            told += _waiting(ours)
        child.send_signal(signal.SIGKILL)
        killed = time.time()
        child.wait()
        told += _waiting(ours)
        os.close(ours)
        lines = [line.split() for line in told.split(b"\n")[:-1]]
        ended = {int(step): float(when) for step, when in lines}
        missing = sorted(ended.keys() - (kept or kept_in_log)(Path(folder)))
        return Kill(rest, len(ended), len(ended) - len(missing), killed - ended[missing[0]] if missing else 0.0)


def _waiting(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def kept_in_log(folder: Path) -> set[int]:
    """Return the steps that the run log holds."""
    from trainprobe.errors import FormatError
    from trainprobe.monitor.run_folder import find_logs, steps_of_log

    try:
        return {step for log in find_logs(folder) for step, _ in steps_of_log(log)}
    except FormatError:
        return set()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill trainings and print a line each, then what was lost at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sink", default="parquet")
    parser.add_argument("--train", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train:
        folder, rest, layers, sink, monitor, pipe = given.train
        train(Path(folder), float(rest), int(layers), sink, bool(int(monitor)), int(pipe))
    draw = random.Random(given.seed)
    kills: list[Kill] = []
    with busy(given.busy):
        for number in range(given.kills):
            rest, layers = KINDS[number % len(KINDS)]
            kills.append(kill_one(rest, layers, given.sink, number // len(KINDS) % 2 == 1, draw.uniform(0.3, 6)))
            sys.stdout.write(json.dumps(kills[-1]._asdict()) + "\n")
            sys.stdout.flush()
    for rest, layers in KINDS:
        of_kind = [kill for kill in kills if kill.rest == rest]
        if of_kind:
            steps, seconds = max(kill.steps - kill.kept for kill in of_kind), max(kill.seconds for kill in of_kind)
            none = sum(not kill.kept for kill in of_kind)
            sys.stdout.write(
                f"a rest of {rest:g} s, {layers} layers: {len(of_kind)} kills, at most {steps} steps and {seconds:.2f} s lost, "
                f"{none} kept none\n"
            )
    late = [kill.seconds for kill in kills if kill.seconds > 1]
    sys.stdout.write(f"{len(late)} of {len(kills)} kills cost more than a second\n")


if __name__ == "__main__":
    main()
