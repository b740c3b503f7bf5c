"""Tasks in this process, or on the cores of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Given = TypeVar("Given")
Got = TypeVar("Got")
Run = Callable[[Callable[[Given], Got], Sequence[Given]], Iterator[Got]]  # carries out tasks: here, on cores, or on Ray
AnyRun = Run[Any, Any]


def in_turn(function: Callable[[Given], Got], tasks: Sequence[Given]) -> Iterator[Got]:
    """Carry out tasks in this process, one after the other."""
    return map(function, tasks)


def on_cores(function: Callable[[Given], Got], tasks: Sequence[Given], processes: int = 0) -> Iterator[Got]:
    """Carry out tasks in processes of their own, and yield their results in the order of the tasks.

    processes: at most so many at once; 0 means one for each core.
    """
    with ProcessPoolExecutor(min(len(tasks), processes or cores()), mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, tasks)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
