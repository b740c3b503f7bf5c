"""A loss that becomes NaN: a gain is trained below zero, and a square root makes NaN of it.

    trainprobe run -o first -- examples/first_nan.py
    echo '{record: mix, step: [3]}' > full.yaml
    trainprobe run full.yaml -o again -- examples/first_nan.py
    trainprobe nan-trace again

The first run names the step, and says what to record. The last command names the call, its module, its line and its inputs.
"""

from collections import OrderedDict

import torch
from torch import nn


class Scale(nn.Module):
    """Multiply by the root of a gain that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        root = torch.sqrt(self.gain)
        return x * root


torch.manual_seed(0)
model = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.GELU(), scale=Scale(), down=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(20):
    x = torch.randn(32, 8)
    loss = model(x).square().mean() + model.scale.gain
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
