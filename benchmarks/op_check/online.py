"""Print what sending operators to a server costs a training: `python -m benchmarks.op_check.online [--rounds N]`.

A GPT trains on the CPU, one thread. Steps without the probe, and steps under a plan whose every third step is judged elsewhere,
take turns. Three servers: one that takes everything and answers nothing, one that stops reading after its greeting, and a port
where nobody listens. If the training waited for the network, the three would differ. Times are those of the training's thread:
CPU time, and wall time, which other programs on the machine lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as functional

import trainprobe
from trainprobe.demo.gpt import GPT, Shape
from trainprobe.op_check.online.frames import Decoder, Kind, WireFrame, encode


def takes_all(connection: socket.socket) -> None:
    greet(connection)
    while connection.recv(1 << 20):
        pass


def stops_reading(connection: socket.socket) -> None:
    greet(connection)


def greet(connection: socket.socket) -> None:
    decoder = Decoder(0)
    while not list(decoder.feed(connection.recv(4096))):
        pass
    connection.sendall(encode(WireFrame(Kind.WELCOME, {"window": 1 << 40})))


@contextlib.contextmanager
def serving(behave: Callable[[socket.socket], None] | None) -> Generator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while behave is not None:
                held.append(listener.accept()[0])
                behave(held[-1])

    if behave is None:
        listener.close()
    threading.Thread(target=serve, daemon=True).start()
    yield port
    for each in (listener, *held):
        each.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=8)
    asked.add_argument("--width", type=int, default=128)
    options = asked.parse_args()
    torch.set_num_threads(1)
    for name, behave in (("takes all", takes_all), ("stops reading", stops_reading), ("nobody there", None)):
        times = measure(behave, options.rounds, options.width)
        bare = {kind: statistics.median(t[i] for t in times["bare"]) for i, kind in enumerate(("CPU", "wall"))}
        for what in ("judged", "others"):
            ratios = [
                f"{kind} {statistics.median(t[i] for t in times[what]) / bare[kind]:.2f}"
                for i, kind in enumerate(("CPU", "wall"))
            ]
            print(f"{name:14} {what:7} {', '.join(ratios)} of a bare step of {bare['CPU'] * 1e3:.1f} ms CPU")


def measure(behave: Any, rounds: int, width: int) -> dict[str, list[tuple[float, float]]]:
    """Return (CPU, wall) seconds of each step: bare ones, judged ones, and those between them."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=width, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randint(0, 256, (4, 64))

    def step() -> None:
        functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(kind: str, around: Any) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        with around:
            step()
        times[kind].append((time.thread_time() - cpu, time.perf_counter() - wall))

    with serving(behave) as port, tempfile.TemporaryDirectory() as folder:
        plan: dict[str, Any] = {"server": f"127.0.0.1:{port}", "step": ["every 3"], "wait": 0.0}
        settings: dict[str, Any] = {"level": "off", "sinks": [], "console": False, "output": folder, "op_check": plan}
        with trainprobe.watch(model, optimizer, **settings) as probe:
            for turn in range(3 * (rounds + 1)):
                kind = "others" if turn % 3 else "judged"
                timed("bare", contextlib.nullcontext())
                timed(kind, probe.step())
                if turn < 3:
                    times.clear()  # the first of each kind
    return times


main()
