"""Train a step of a model that is split by hand over two axes, whose position `place=` tells: `train_on_axes.py FOLDER CHANGE`.

One rank holds the whole; four ranks are data parallel 2 and tensor parallel 2. Weights say how they are cut, as Megatron's do.
CHANGE: "shard" doubles the shard of one rank, "silent" leaves the place out, "" changes nothing.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import trainprobe

WIDTH, HIDDEN = 8, 16


class Copied(torch.autograd.Function):
    """What goes into a split pair of layers: its gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        total = gradients[0].clone()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """What comes out of it: terms that are summed."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


class Pair(nn.Module):
    def __init__(self, rank: int, size: int, group) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        whole = [torch.randn(HIDDEN, WIDTH, generator=g) * 0.3, torch.randn(WIDTH, HIDDEN, generator=g) * 0.3]
        self.group = group
        self.up, self.down, self.norm = nn.Module(), nn.Module(), nn.LayerNorm(WIDTH)
        for module, weight, dim in ((self.up, whole[0], 0), (self.down, whole[1], 1)):
            module.weight = nn.Parameter(weight.chunk(size, dim)[rank].clone())
            module.weight.tensor_model_parallel, module.weight.partition_dim = True, dim

    def forward(self, x):
        hidden = functional.linear(Copied.apply(self.norm(x), self.group), self.up.weight).tanh()
        return x + Summed.apply(functional.linear(hidden, self.down.weight), self.group)


def main() -> None:
    folder, change = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 2 if world == 4 else 1
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 2 else [None]
    data, tensor = divmod(rank, size)
    model = Pair(tensor, size, groups[data])
    if change == "shard" and rank in (1, 3):
        with torch.no_grad():
            model.up.weight.mul_(1.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = trainprobe.Place(rank, world, {"dp": (data, world // size), "tp": (tensor, size)})
    where = {} if change == "silent" else {"place": place}
    plan = {"level": "L0", "step": [0], "summary": "both", "monitor": {"parameters": True, "gradients": True}}
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **where, **plan) as probe, probe.step():
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).chunk(world // size)[data]
        model(batch).pow(2).mean().backward()
        for p in model.parameters() if world > size else ():
            dist.all_reduce(p.grad, group=_across(tensor))
            p.grad /= world // size
        optimizer.step()
    dist.destroy_process_group()


_GROUPS: list = []


def _across(tensor: int):
    """Return the group of the ranks that hold the same shards."""
    if not _GROUPS:
        _GROUPS.extend([dist.new_group([0, 2]), dist.new_group([1, 3])])
    return _GROUPS[tensor]


if __name__ == "__main__":
    main()
