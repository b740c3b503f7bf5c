"""An update that only makes the state of a fresh optimizer, as every load by `torch.distributed.checkpoint` does.

`dcp`: torch's own. `hand`: written by hand. `tried`: behind a forward that is not trained on. `warm`: none, and a rate that
begins at 0. `autocast`: as `dcp`, and from step 23 on the update runs under autocast.
"""

import contextlib
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

kind = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
if kind in ("dcp", "tried", "autocast"):
    if kind == "tried":
        model(torch.randn(2, 8))
    get_optimizer_state_dict(model, optimizer)
if kind == "hand":
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10) if kind == "warm" else 1.0)
for step in range(45):
    x = torch.randn(32, 8)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    on = kind == "autocast" and step >= 23
    with torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext():
        optimizer.step()
    schedule.step()
