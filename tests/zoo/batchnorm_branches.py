"""A CNN with batch normalisation whose branches share one input, so that its gradient is a sum of several."""

import torch
from torch import nn

from tests.zoo import normal


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.wide = nn.Conv2d(6, 6, 3, padding=1)
        self.narrow = nn.Conv2d(6, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(6 * 4 * 4, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.wide(x) + self.narrow(x) + x)
        y = self.pool(torch.relu(y))
        return self.head(y.flatten(1))


def build():
    return Branches()


def batch(step):
    return (normal(step, 4, 3, 8, 8),)
