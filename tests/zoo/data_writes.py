"""Writes that no version counter shows: through `.data`, through NumPy, and swapped storage."""

import torch
from torch import nn

from tests.zoo import normal


class DataWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.linear(x)
        self.average.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.count.numpy()[...] += 1
        self.linear.weight.data = self.linear.weight.data * 0.999
        return y - self.average


def build():
    return DataWrites()


def batch(step):
    return (normal(step, 4, 6),)
