"""A teacher under no_grad and inference_mode, detached values and frozen parameters beside a trained student."""

import torch
from torch import nn

from tests.zoo import normal


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 4).requires_grad_(False)
        self.shared = nn.Linear(6, 6)
        self.student = nn.Linear(6, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(self.shared(x))
        with torch.inference_mode():
            scale = float(self.teacher(x).abs().mean())
        y = self.student(self.shared(x))
        return ((y - target) ** 2).mean() * (1 + 0 * scale) + self.shared(x.detach()).mean()


def build():
    return Distilled()


def batch(step):
    return (normal(step, 4, 6),)
