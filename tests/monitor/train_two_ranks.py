"""Two ranks of DistributedDataParallel whose loop calls the bare model, so that nothing is reduced; rank 1 meets a NaN late."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import trainprobe

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
plan = {"level": "off", "monitor": True, "audit": {"every": 2}}
with trainprobe.watch(wrapped, optimizer, plan, output=sys.argv[1]) as probe:
    for step in range(9):
        with probe.step():
            x = torch.randn(8, 4)
            if step == 7 and dist.get_rank() == 1:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            (wrapped if step > 6 else model)(x).square().mean().backward()
            optimizer.step()
dist.destroy_process_group()
