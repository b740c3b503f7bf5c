"""The model generates behind the last step: in training mode (`training`), or in `evaluation` mode.

`cut`: an error ends step 30.
"""

import sys

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(45):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    loss = (model(x) - x.sin()).square().mean()
    if kind == "cut" and step == 30:
        raise RuntimeError("the data ends")
    loss.backward()
    optimizer.step()
if kind == "evaluation":
    model.eval()
x = torch.randn(1, 8)
for _ in range(5):
    x = model(x)
