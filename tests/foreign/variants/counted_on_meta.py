"""The operations of a step are counted before the training: on a `meta` copy, or on the `model` itself.

`nothing`: there is no training.
"""

import sys

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

kind = sys.argv[1]
torch.manual_seed(0)


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


with torch.device("meta"):
    copy, batch = made(), torch.randn(4, 8)
model = made()
with FlopCounterMode(display=False):
    (model if kind == "model" else copy)(torch.randn(4, 8) if kind == "model" else batch).sum().backward()
model.zero_grad()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(0 if kind == "nothing" else 45):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
