"""The collective of `engine.core.gathering` over torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

from trainprobe.engine.core.gathering import Gathering, Payload


def gathering() -> Gathering:
    """Return a Gathering over the default process group; alone where there is none."""
    return Gathering(ranks, _all_gather)


def ranks() -> int:
    """Return how many ranks the training has."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_gather(words: Payload) -> list[Payload]:
    device = _device()
    mine = torch.from_numpy(words.view(np.int64)).to(device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    released((mine, *received))
    return list(torch.stack(received).cpu().numpy().view(np.uint64))


def largest(number: torch.Tensor) -> torch.Tensor:
    """Return the largest number of all ranks, by one collective of the default group; the own one where there is none."""
    if ranks() == 1:
        return number
    number = number.to(_device(), copy=True)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    released((number,))
    return number


def released(tensors: Iterable[torch.Tensor], timeout: float = 1.0) -> None:
    """Wait until a collective that has ended no longer holds these tensors, at most `timeout` seconds.

    A thread of gloo lets go of them after the collective has returned, and needs the interpreter's lock for that. A program
    that ends meanwhile is aborted (pytorch issue 190489); the probe's collective is often a training's last.
    """
    end = time.monotonic() + timeout
    for tensor in (tensor for tensor in tensors if tensor.device.type == "cpu"):
        while tensor._use_count() > 1 and time.monotonic() < end:  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(0)


def _device() -> torch.device:
    """Return where the tensors of the default group's collectives must be."""
    backends = str(dist.get_backend_config(dist.group.WORLD)) if hasattr(dist, "get_backend_config") else dist.get_backend()
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    kind = next((name.split(":")[0] for name in backends.split(",") if ":" in name), "cuda")
    return torch.device(kind, getattr(torch, kind).current_device())
