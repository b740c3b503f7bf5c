"""A bug of two ranks: each rank draws the same data, so the second GPU adds nothing.

trainprobe run -- torchrun --standalone --nproc_per_node 2 examples/ddp_loop.py
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)  # the same model on every rank, and by mistake the same data
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(100):
    x = torch.randn(32, 16)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

distributed.destroy_process_group()
