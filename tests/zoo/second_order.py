"""A gradient penalty: a backward with create_graph inside the loss, and a second backward through it."""

import torch
from torch import nn

from tests.zoo import normal


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))


def batch(step):
    return (normal(step, 4, 6),)


def loss(model, batch):
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (slope.norm(dim=-1) - 1).square().mean()
