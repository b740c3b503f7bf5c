"""A training on two ranks in which rank 1 takes the logarithm of negative numbers in step 3.

Or, with `sum` as the third argument, one in which a sum over both ranks overflows there.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

import trainprobe


class Block(nn.Module):
    """A linear layer, and a logarithm when `bad`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bad: bool) -> torch.Tensor:
        """Apply it."""
        h = self.up(x)
        return x + (torch.log(h) if bad else h)


class Net(nn.Module):
    """Three blocks behind masked attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor, bad: bool) -> torch.Tensor:
        """Apply them."""
        x = torch.softmax(x @ x.transpose(1, 2) + self.mask, -1) @ x
        for i, block in enumerate(self.blocks):
            x = block(x, bad and i == 1)
        return x


def summed(x: torch.Tensor, functional: bool) -> torch.Tensor:
    """Return the sum over the ranks, by a functional collective or by one that writes in place."""
    if functional:
        return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
    dist.all_reduce(x)
    return x


def main() -> None:
    """Train for five steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sums, functional = "sum" in sys.argv[3:], "functional" in sys.argv[3:]
    plan = {"output": sys.argv[2], "level": sys.argv[1], "step": [0, 1, 2, 3, 4], "task": "statistics", "console": False}
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        for step in range(5):
            x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            with probe.step():
                loss = model(x, step == 3 and rank == 1 and not sums).square().mean()
                if sums:
                    scale = torch.full((2,), 3e38 if step == 3 else 1.0)
                    loss = loss * summed(scale, functional).mean()
                probe.note("loss", loss.item())
                optimizer.zero_grad()
                loss.backward()
                summed(loss.detach().clone(), functional).item()
                optimizer.step()
    dist.destroy_process_group()


main()
