"""A bug that no log shows: the optimizer was made before the model got its new head, so the head never learns.

trainprobe run -- examples/new_head.py
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model[4] = nn.Linear(64, 5)  # a new head, which the optimizer does not know

for _ in range(300):
    x = torch.randn(64, 16)
    loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
