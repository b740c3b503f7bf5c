"""Tasks on the cores of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Given = TypeVar("Given")
Got = TypeVar("Got")


def on_cores(function: Callable[[Given], Got], tasks: Sequence[Given], processes: int = 0) -> Iterator[Got]:
    """Carry out tasks in processes of their own, and yield their results in the order of the tasks.

    processes: at most so many at once; 0 means one for each core.
    """
    with ProcessPoolExecutor(min(len(tasks), processes or cores()), mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, tasks)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
