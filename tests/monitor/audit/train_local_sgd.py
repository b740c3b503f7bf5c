"""Train on two ranks by local SGD: from step 3 on each by itself, their weights averaged each fourth step; print the findings.

python -m tests.distributed.launch 2 tests/monitor/audit/train_local_sgd.py FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import trainprobe


def main() -> None:
    """Train for twelve steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=3), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
    data = torch.Generator().manual_seed(dist.get_rank())
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit={"every": 1}, output=sys.argv[1]) as probe:
        for _ in range(12):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(16, 8, generator=data)).square().mean().backward()
                optimizer.step()
    print("found", [(f.severity, f.message) for f in probe.findings])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
