"""Two runs that should be equal, and the first call where they differ.

    python examples/two_runs.py
    trainprobe dump-compare two_runs/a two_runs/b

The second model approximates GELU, as some frameworks do by default.
"""

import torch
from torch import nn

import trainprobe


def train(folder: str, approximate: str) -> None:
    """Train three steps and record each module's inputs and outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(approximate), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainprobe.watch(model, optimizer, record="mix", output=folder, on_existing="replace") as probe:
        for _ in range(3):
            with probe.step():
                x = torch.randn(32, 16)
                loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


train("two_runs/a", "none")
train("two_runs/b", "tanh")
