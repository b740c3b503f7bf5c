"""Tasks on a Ray cluster whose machines see the same paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from trainprobe.errors import MissingExtra

Given = TypeVar("Given")
Got = TypeVar("Got")


def on_ray(function: Callable[[Given], Got], tasks: Sequence[Given], threads: int = 1) -> Iterator[Got]:
    """Start all tasks on a Ray cluster and return their results in the order of the tasks. Raises MissingExtra without Ray.

    threads: how many a task keeps busy, so that Ray starts no more tasks on a machine than it has CPUs for.
    """
    ray = _connected()
    largest = max((int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"]), default=1)
    remote = ray.remote(num_cpus=max(1, min(threads, largest)))(function)
    return map(ray.get, [remote.remote(task) for task in tasks])


def cluster_cores() -> int:
    """Return how many CPUs the cluster has. Raises MissingExtra without Ray."""
    return max(1, int(_connected().cluster_resources().get("CPU", 1)))


def _connected() -> Any:
    """Return Ray, connected to a cluster, or to one that is started here."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray", "--ray") from error
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, log_to_driver=False)
    return ray
