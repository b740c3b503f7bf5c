"""torch.func inside a forward: vmap, grad and functional_call, whose tensors are wrapped and cannot be read."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.zoo import normal


class Transformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        parameters = dict(self.inner.named_parameters())
        slope = vmap(grad(lambda row: functional_call(self.inner, parameters, (row,)).sum()))(x)
        return self.head(vmap(self.inner)(x)) + slope.sum(-1, keepdim=True)


def build():
    return Transformed()


def batch(step):
    return (normal(step, 4, 6),)


def loss(model, batch):
    return model(torch.clone(batch[0])).square().mean()
