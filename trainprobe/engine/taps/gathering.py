"""The collective of `engine.gathering` over torch.distributed."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from trainprobe.engine.gathering import Gathering, Words


def gathering() -> Gathering:
    """Return a Gathering over the default process group; alone where there is none."""
    return Gathering(_ranks, _all_gather)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_gather(words: Words) -> list[Words]:
    device = _device()
    mine = torch.from_numpy(words.view(np.int64)).to(device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    return [row.cpu().numpy().view(np.uint64) for row in received]


def _device() -> torch.device:
    """Return where the tensors of the default group's collectives must be."""
    backends = str(dist.get_backend_config(dist.group.WORLD)) if hasattr(dist, "get_backend_config") else dist.get_backend()
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    kind = next((name.split(":")[0] for name in backends.split(",") if ":" in name), "cuda")
    return torch.device(kind, getattr(torch, kind).current_device())
