"""FSDP2, whose root stays gathered behind a forward without gradients: `before` the first step, or `between` steps.

`nested`: layers that stay gathered too. `written`: as `between`, and something writes to a weight behind step 0.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
if kind == "nested":
    fully_shard(model[0], reshard_after_forward=False)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.train()


evaluate()
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(30):
    x = torch.randn(16, 8, generator=data)
    (model(x) - x[:, :4]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind in ("between", "nested", "written"):
        evaluate()
    if kind == "written" and not step:
        model.reshard()
        with torch.no_grad():
            model[0].weight.to_local().mul_(1.01)
dist.destroy_process_group()
