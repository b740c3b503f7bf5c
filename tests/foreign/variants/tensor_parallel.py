"""Tensor parallel over two ranks, with dropout on what both compute: one seed (`healthy`), or a `seed` for each rank."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
parallelize_module(model, mesh, {"3": ColwiseParallel(), "5": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
torch.manual_seed(dist.get_rank() if kind == "seed" else 7)
data = torch.Generator().manual_seed(1)
for _ in range(30):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    (model(x) - x.sin()).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
