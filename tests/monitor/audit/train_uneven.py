"""Train on two ranks that have uneven inputs, inside torch's Join; print the losses and what the audit said of each rank.

python -m tests.distributed.launch 2 tests/monitor/audit/train_uneven.py FOLDER [watched]
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import trainprobe


def main() -> None:
    """Train rank 0 for three steps and rank 1 for eight."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    plan = {"level": "off", "sinks": [], "audit": {"every": 1}, "output": sys.argv[1]}
    with trainprobe.watch(model, optimizer, plan) if "watched" in sys.argv else nullcontext() as probe, Join([model]):
        for _ in range(3 + 5 * dist.get_rank()):
            with probe.step() if probe else nullcontext():
                step()
    print("losses", [loss.hex() for loss in losses])
    print("found", [(f.severity, f.message) for f in probe.findings] if probe else [])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what Join leaves behind can keep the process from ending, without a probe too


if __name__ == "__main__":
    main()
