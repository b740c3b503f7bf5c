"""In-place activations and in-place writes to views: values change after they were seen, and graph edges move."""

import torch
from torch import nn

from tests.zoo import normal

IN_PLACE = True


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2, inplace=True)

    def forward(self, x):
        x = self.act(self.first(x))
        x = self.drop(self.second(x))
        x[:, 1:3].mul_(2.0)
        x[:, 0] = x[:, 3] + 1.0
        x += 0.5
        return torch.nn.functional.hardtanh(x, -3.0, 3.0, inplace=True)


def build():
    return InPlace()


def batch(step):
    return (normal(step, 5, 6),)
