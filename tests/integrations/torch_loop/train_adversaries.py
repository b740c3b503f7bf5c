"""Two models of DistributedDataParallel against each other: the judge's gradients are reduced twice a round."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from trainprobe.integrations.torch_loop import attach_to_script


def main(output: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    made = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    judge = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    stepped, judging = (torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in (made, judge))
    loss = nn.BCEWithLogitsLoss()
    probe = attach_to_script({"monitor": True, "audit": {"every": 1}, "output": output})
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(40):
        real, fake = torch.randn(16, 4) * 0.5 + 1, made(torch.randn(16, 8))
        judging.zero_grad()
        (loss(judge(real), torch.ones(16, 1)) + loss(judge(fake.detach()), torch.zeros(16, 1))).backward()
        judging.step()
        stepped.zero_grad()
        loss(judge(fake), torch.ones(16, 1)).backward()
        stepped.step()
    probe.close()
    assert [finding for finding in probe.findings if finding.severity != "info"] == []
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
