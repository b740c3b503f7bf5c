"""Activation checkpointing (use_reentrant=True): the forward of each block runs again inside the backward."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo import normal


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def build():
    return Checkpointed()


def batch(step):
    return (normal(step, 4, 6),)
