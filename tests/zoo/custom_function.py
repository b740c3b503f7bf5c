"""A hand-written autograd function, one that returns its input, one with no gradient for an input, and a clone of a leaf."""

import torch
from torch import nn

from tests.zoo import normal


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, power):
        ctx.save_for_backward(x)
        return x**power, x > 0

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)
        self.identity = nn.Identity()

    def forward(self, x):
        y, positive = Cube.apply(self.first(x), 3)
        y = self.identity(y) + Reversed.apply(y) * positive
        return self.second(y), self.identity(x)


def build():
    return Custom()


def batch(step):
    return (normal(step, 4, 6),)
