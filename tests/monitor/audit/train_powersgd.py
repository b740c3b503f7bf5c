"""Train on two ranks by DistributedDataParallel with PowerSGD's communication hook; print the findings of each rank.

python -m tests.distributed.launch 2 tests/monitor/audit/train_powersgd.py FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import trainprobe


def main() -> None:
    """Train for eight steps, the last five of them compressed."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = [(8, 64), (64, 64), (64, 3)]
    model = DistributedDataParallel(nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh()))))
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3), powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    audit = {"every": 1, "relations": {"reduced_gradients": 1}}
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=audit, output=sys.argv[1]) as probe:
        for _ in range(8):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(16, 8, generator=data)).square().mean().backward()
                optimizer.step()
    print("found", [f.rule for f in probe.findings])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
