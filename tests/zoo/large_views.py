"""Views of large values, with every kind of write in between: what may be told of one without reading it again."""

import torch
from torch import nn

from tests.zoo import normal

HEADS = 4


class LargeViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = (t.view(-1, HEADS, 64).transpose(0, 1) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        doubled = mixed.clone()
        doubled.view(-1).relu()
        doubled.view(-1)[::2].mul_(2)  # shows in the counter that all its views share
        doubled.view(-1).relu()
        with torch.no_grad():
            kept = mixed.clone()
            alias = kept.data  # has a counter of its own
            kept.view(-1).relu()
            alias.neg_()
            kept.view(-1).relu()
            kept.numpy()[...] *= 0.5
            kept.t().relu()
        return doubled.t() + kept


def build():
    return LargeViews()


def batch(step):
    return (normal(step, 256, 256),)
