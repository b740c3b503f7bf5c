"""Train a step of a model whose experts are split by hand, numbered from 0 on each rank: `train_experts.py FOLDER CHANGE`.

One rank holds four experts, two ranks two each; tokens of expert e are column e of each sample. CHANGE: "told" says the axes,
"fault" changes an expert of rank 1.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import trainprobe

WIDTH, EXPERTS = 8, 4


class Exchanged(torch.autograd.Function):
    """Tokens are sent to the ranks of their experts, and back in the backward."""

    @staticmethod
    def forward(ctx, x):
        return exchanged(x)

    @staticmethod
    def backward(ctx, *gradients):
        return exchanged(gradients[0])


def exchanged(x):
    if dist.get_world_size() == 1:
        return x.clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous())
    return out


class Model(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        count = EXPERTS // ranks
        self.experts = nn.ModuleList(every[rank * count : (rank + 1) * count])

    def forward(self, x):  # [samples, experts, width]
        x = self.first(x)
        sent = Exchanged.apply(x.transpose(0, 1).contiguous())  # of two ranks: (rank, expert) x samples
        count = len(self.experts)
        own = sent.view(EXPERTS // count, count, *sent.shape[1:])
        done = torch.stack([expert(own[:, i]) for i, expert in enumerate(self.experts)], 1)
        return self.last(Exchanged.apply(done.reshape(sent.shape)).transpose(0, 1)).tanh()


def main() -> None:
    folder, change = [*sys.argv[1:], ""][:2]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model(rank, world)
    if change == "fault" and rank == 1:
        with torch.no_grad():
            model.experts[1].weight.mul_(1.2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    axes = {"dp": (rank, world), "ep": (rank, world)}
    where = {"place": trainprobe.Place(rank, world, axes)} if change == "told" else {}
    plan = {"level": "L0", "step": [0], "summary": "both", "monitor": {"parameters": True, "gradients": True}, "console": False}
    batch = torch.randn(8, EXPERTS, WIDTH, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **where, **plan) as probe, probe.step():
        model(batch).pow(2).mean().backward()
        for name, p in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
