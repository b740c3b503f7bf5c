"""The one thing in which a run differs from the base run: its name is looked up, so that no argument gives it away."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

SAMPLES, FEATURES, BATCH = 32, 6, 4


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 8)
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(8, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.first = Block(0.1)
        self.second = Block(0.2 if change == "dropout" else 0.1)
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.second(self.first(x))
        if self.change == "extra dropout":
            x = nn.functional.dropout(x, 0.1, self.training)
        return ((self.head(x).squeeze(-1) - y) ** 2).mean()


def seed_all(change: str) -> None:
    seed = 8 if change == "seed" else 7
    torch.manual_seed(seed)
    np.random.seed(1)
    random.seed(1)


def rate(change: str) -> float:
    return 3e-2 if change == "lr" else 1e-2


def samples(change: str) -> tuple[Tensor, Tensor]:
    """Return features [32, 6] and targets [32] that no seed of the run touches, in the order in which they are trained on."""
    generator = torch.Generator().manual_seed(6 if change == "data" else 5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.arange(SAMPLES, dtype=torch.float32) / SAMPLES
    order = torch.arange(SAMPLES)
    if change == "order":
        blocks = order[: 4 * BATCH].view(4, BATCH)
        order[: 4 * BATCH] = blocks[[1, 0, 3, 2]].reshape(-1)
    if change == "shift":
        order = order.roll(BATCH)
    if change == "shuffled":
        order[: 4 * BATCH] = order[: 4 * BATCH].view(4, BATCH).t().reshape(-1)
    if change == "late data":
        x[3 * BATCH] += 1
    return x[order], y[order]


def nudge(model: nn.Module, change: str) -> None:
    if change == "weight":
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if n.endswith("second.down.weight"))[0, 0] += 1e-3
