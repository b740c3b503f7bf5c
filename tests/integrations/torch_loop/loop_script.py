"""A plain loop that knows nothing of the probe: accumulation, evaluation between steps, DDP under torchrun; prints its losses.

loop_script.py [plain|scaler|crash]
"""

import os
import sys

import torch
from torch import nn

from tests.distributed.one_rank import settle

kind = sys.argv[1] if len(sys.argv) > 1 else "plain"
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
torch.manual_seed(3)
model: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind == "scaler")
torch.manual_seed(100 + rank)
for step in range(5):
    optimizer.zero_grad()
    for _ in range(2):
        loss = model(torch.randn(4, 6)).square().mean() / 2
        if kind == "scaler" and step == 2:
            loss = loss * float("inf")
        if kind == "crash" and step == 3:
            raise RuntimeError("the training broke")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 6))
    model.train()
    sys.stdout.write(f"loss {step} {float(loss):.17g}\n")
sys.stdout.write(f"weights {sum(float(p.double().sum()) for p in model.parameters()).hex()}\n")
if ranks > 1:
    torch.distributed.destroy_process_group()
    settle()
