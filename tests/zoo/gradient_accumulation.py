"""Three micro-batches a step: gradients add up in the parameters before the optimizer reads them."""

from torch import nn

from tests.zoo import normal

MICRO = 3


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def batch(step):
    return (normal(step, 4, 6),)
