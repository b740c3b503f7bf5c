"""Mixed precision: autocast to bfloat16, whose cast weights are cached within a forward and shared by two calls."""

import torch
from torch import nn

from tests.zoo import normal


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 4))


def batch(step):
    return (normal(step, 8, 6),)


def loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch[0])
        z = model(batch[0] * 0.5)
    return (y.float() - 1).square().mean() + z.float().mean()
