"""Share the measuring out over the processes of a torchrun world, or over Ray; the result is the same bit for bit.

Every process opens both checkpoints, measures each n-th task, and gets everybody's outcomes back in the order of the tasks. In
a torchrun world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment) rank 0 gathers them over a socket of its own,
as JSON; no tensor travels, and torch is not needed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainprobe.ckpt_compare.tasks import Advance, Outcome, Task, perform, run
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.core.ray_cluster import cluster_cores, on_ray
from trainprobe.errors import CompareError

PORT_AFTER = 17  # the socket listens this far behind MASTER_PORT, which torchrun itself uses
PATIENCE = 600.0  # seconds that ranks wait for each other
Lines = list[list[Any]]


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of processes), (0, 1) outside of a torchrun world."""
    return int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))


def run_distributed(tasks: Sequence[Task], threads: int | None = None, advance: Advance | None = None) -> list[Outcome]:
    """Measure this process's share of the tasks and return the outcomes of all, in the order of the tasks."""
    rank, size = place()
    if size == 1:
        return run(tasks, threads, advance)
    mine = [_packed(o) for o in run(tasks[rank::size], threads, advance)]
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"]) + PORT_AFTER
    shares = _serve(mine, address, size) if rank == 0 else _send(mine, address, rank)
    return [_unpacked(shares[i % size][i // size]) for i in range(len(tasks))]


def run_on_ray(tasks: Sequence[Task], threads: int | None = None, advance: Advance | None = None) -> list[Outcome]:
    """Measure the tasks on a Ray cluster whose machines see the same paths."""
    count = cluster_cores() * 4
    shares = [tasks[i::count] for i in range(min(count, len(tasks)))]
    done = [*on_ray(_share, shares)]
    if advance is not None:
        advance(sum(t.size for t in tasks))
    return [done[i % len(shares)][i // len(shares)] for i in range(len(tasks))]


def _share(tasks: Sequence[Task]) -> list[Outcome]:
    return [perform(task) for task in tasks]


def _packed(outcome: Outcome) -> list[Any]:
    return [outcome.row, asdict(outcome.difference), outcome.failure]


def _unpacked(line: list[Any]) -> Outcome:
    row, difference, failure = line
    at = difference.pop("at")
    return Outcome(row, Difference(**difference, at=None if at is None else tuple(at)), failure)


def _serve(mine: Lines, address: tuple[str, int], size: int) -> list[Lines]:
    """Take every other rank's outcomes, then give everybody all of them."""
    shares: list[Lines] = [mine, *([] for _ in range(size - 1))]
    with socket.create_server(("", address[1])) as server:
        server.settimeout(PATIENCE)
        waiting: list[socket.socket] = []
        try:
            while len(waiting) < size - 1:
                peer, _ = server.accept()
                rank, share = _receive(peer)
                shares[rank] = share
                waiting.append(peer)
        except TimeoutError as error:
            raise CompareError(f"only {len(waiting)} of {size - 1} other ranks reported within {PATIENCE:.0f} s") from error
    for peer in waiting:  # the server is closed: who comes with the next batch waits until it opens again
        with peer:
            peer.sendall(json.dumps(shares).encode() + b"\n")
    return shares


def _send(mine: Lines, address: tuple[str, int], rank: int) -> list[Lines]:
    with _connected(address) as peer:
        peer.sendall(json.dumps([rank, mine]).encode() + b"\n")
        return _receive(peer)


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            peer = socket.create_connection(address, timeout=PATIENCE)
        except OSError as error:
            if time.monotonic() > deadline:
                raise CompareError(f"rank 0 cannot be reached at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.1)
        else:
            return peer


def _receive(peer: socket.socket) -> Any:
    peer.settimeout(PATIENCE)
    with peer.makefile("rb") as stream:
        return json.loads(stream.readline())
