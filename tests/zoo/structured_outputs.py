"""Outputs that are dataclasses, dicts, named tuples and nested lists, with one tensor in two places."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.zoo import normal

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Tensor
    hidden: dict
    note: str = "text"
    nothing: None = None


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return Pair(self.a(x), [self.b(x), {"both": self.a(x) * 2, "count": 3}])


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        first, (second, rest) = self.inner(x)
        logits = self.head(first + second)
        return Output(logits, {"rest": rest, "again": logits, "list": [second, (first, torch.zeros(0))]})


def build():
    return Structured()


def batch(step):
    return (normal(step, 4, 6),)
