"""A training on two data-parallel ranks: WRAPPER (`fsdp2`, `ddp`) and what is done to it.

`healthy`. `evaluation`: the model trains in evaluation mode. `same`: as `evaluation`, and both ranks have the same data.
`twice`: the loss of rank 1 is multiplied by 2. `parts`: ranks whose batches differ in difficulty by a factor of about 2.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

wrapper, kind = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 4))
model = fully_shard(model) if wrapper == "fsdp2" else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
if kind in ("evaluation", "same"):
    model.eval()
rank = dist.get_rank()
data = torch.Generator().manual_seed(0 if kind == "same" else rank)
torch.manual_seed(rank)
for _ in range(60):
    x = torch.randn(64, 8, generator=data)
    target = x[:, :4].sin() + torch.randn(64, 4, generator=data) * (1.4**rank if kind == "parts" else 1.0)
    loss = (model(x) - target).square().mean()
    if kind == "twice" and rank == 1:
        loss = loss * 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
