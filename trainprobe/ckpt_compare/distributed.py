"""Share the measuring out over the processes of a torchrun world, or over Ray; the result is the same bit for bit.

Every process opens both checkpoints, measures each n-th task, and gets everybody's outcomes back in the order of the tasks. In
a torchrun world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment) they meet in torch.distributed's own store, the
one by which the world itself found together: as JSON, no tensor travels, and nothing of ours listens.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from typing import Any

from trainprobe.ckpt_compare.tasks import Advance, Outcome, Task, perform, run
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.core.ray_cluster import cluster_cores, on_ray
from trainprobe.engine.storage.dumps.tensor_files import load_torch
from trainprobe.errors import CompareError

PATIENCE = 600.0  # seconds that ranks wait for each other
PART = 1 << 20  # bytes of one entry of the store
LONGEST_LINE = 1 << 16  # bytes that one outcome may take
Lines = list[list[Any]]
_batches = itertools.count()


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of processes), (0, 1) outside of a torchrun world."""
    return int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))


def run_distributed(tasks: Sequence[Task], threads: int | None = None, advance: Advance | None = None) -> list[Outcome]:
    """Measure this process's share of the tasks and return the outcomes of all, in the order of the tasks."""
    rank, size = place()
    if size == 1:
        return run(tasks, threads, advance)
    mine = [_packed(o) for o in run(tasks[rank::size], threads, advance)]
    shares = _exchange(mine, [len(tasks[i::size]) for i in range(size)], rank)
    try:
        return [_unpacked(shares[i % size][i // size]) for i in range(len(tasks))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CompareError(f"what another rank sent is no outcome of a comparison: {error!r:.200}") from error


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


def _exchange(mine: Lines, counts: Sequence[int], rank: int) -> list[Lines]:
    """Put this rank's outcomes into the store and return those of all ranks. counts: how many each rank has to send.

    Raises CompareError where a rank does not send what it has to within PATIENCE.
    """
    store, batch = _store(), f"trainprobe/{next(_batches)}"
    text = json.dumps(mine).encode()
    parts = [text[i : i + PART] for i in range(0, len(text), PART)]
    for i, part in enumerate(parts):
        store.set(f"{batch}/{rank}/{i}", part)
    store.set(f"{batch}/{rank}", str(len(parts)))
    shares = [mine if other == rank else _received(store, f"{batch}/{other}", other, n) for other, n in enumerate(counts)]
    store.add(f"{batch}/read", 1)
    deadline = time.monotonic() + PATIENCE
    while rank == 0 and store.add(f"{batch}/read", 0) < len(counts) and time.monotonic() < deadline:
        time.sleep(0.02)  # the store may end with rank 0
    for other in range(len(counts) if rank == 0 else 0):  # a long comparison does not fill it
        for i in range(int(store.get(f"{batch}/{other}"))):
            store.delete_key(f"{batch}/{other}/{i}")
    return shares


def _received(store: Any, key: str, rank: int, count: int) -> Lines:
    try:
        number = int(store.get(key))
        if number > 1 + count * LONGEST_LINE // PART:
            raise ValueError(f"{number} parts for {count} outcomes")
        share = json.loads(b"".join(store.get(f"{key}/{i}") for i in range(number)))
    except RuntimeError as error:  # of the store: it waits no longer
        raise CompareError(f"rank {rank} did not report within {PATIENCE:.0f} s: {str(error)[:200]}") from error
    except (ValueError, RecursionError) as error:
        raise CompareError(f"rank {rank} reported what cannot be read: {error}") from error
    if not isinstance(share, list) or len(share) != count:
        raise CompareError(f"rank {rank} did not report its {count} outcomes: do all ranks compare the same two checkpoints?")
    return share


@cache
def _store() -> Any:
    """Return the store of the world: that of torchrun where it has one, else one that rank 0 makes as torch does it."""
    torch = load_torch("a comparison over several processes")
    try:
        made = next(iter(torch.distributed.rendezvous("env://", timeout=timedelta(seconds=PATIENCE))))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CompareError(f"the ranks did not meet at {where}: {str(error)[:200]}") from error
    return made[0]
