"""Train on two ranks, as FSDP2 and by hand with collectives into new memory; dump the second step.

Two runs are equal, a third has a fault. What memory holds before it is written is another in each run.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainprobe

WIDTH = 16


class ByHand(nn.Module):
    """Gathers tokens of both ranks, and gets a scale from the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        whole = x.new_empty(2 * x.shape[0], WIDTH)
        dist.all_gather_into_tensor(whole, x.detach().contiguous())
        scale = torch.full((4,), 2.0) if dist.get_rank() == 0 else torch.empty(4)
        dist.broadcast(scale, 0)
        total = x.detach().sum(0)
        dist.reduce(total, 0)
        return self.second(x) * scale.mean() + whole.mean()


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "hand":
        return ByHand()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(folder: str, kind: str, level: str, change: str) -> None:
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if change == "faulty" and dist.get_rank() == 1:
        with torch.no_grad():
            weight = [*model.parameters()][2]
            (weight.to_local() if hasattr(weight, "to_local") else weight).mul_(1.5)
    plan = {"level": level, "step": [1], "summary": "both"}
    with trainprobe.watch(model, optimizer, output=f"{folder}/{change}", console=False, on_error="raise", **plan) as probe:
        for i in range(2):
            with probe.step():
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
                loss = model(x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    folder, kind, level = sys.argv[1:]
    dist.init_process_group("gloo")
    for change, filled in (("one", False), ("other", True), ("faulty", False)):
        torch.use_deterministic_algorithms(filled)  # new memory is NaN
        run(folder, kind, level, change)
        torch.use_deterministic_algorithms(False)
        junk = [torch.full((n,), 3e38) for n in (4, 34, 68, 128, 256, 272, 544)]  # what the next run finds there
        del junk
    dist.destroy_process_group()
