"""Two steps on two ranks that reduce, broadcast and send, for the plugins' pages: `train_for_plugins.py FOLDER` (a, b)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
import torch.distributed as dist
from torch import nn

import trainprobe

MONITOR = {"parameters": True, "gradients": True}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, activation in (("a", nn.GELU()), ("b", nn.GELU("tanh"))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(rank)
        output = Path(sys.argv[1]) / name
        with trainprobe.watch(model, optimizer, output=output, level="mix", summary="both", monitor=MONITOR) as probe:
            for _ in range(2):
                x = torch.randn(4, 6, generator=generator)
                with probe.step():
                    optimizer.zero_grad()
                    (model(x) ** 2).mean().backward()
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                    norm = torch.full((2,), 1.0 + rank)
                    dist.broadcast(norm, 1)
                    overflow = torch.exp(norm * 100 * rank)  # infinite on rank 1 alone
                    overflow = overflow * 2
                    _ = torch.minimum(overflow, norm)
                    if rank == 0:
                        dist.send(norm, 1)
                    else:
                        dist.recv(norm, src=0)
                    optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
