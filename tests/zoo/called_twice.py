"""One module called twice in a forward, once on its own output, and a submodule that is shared by two parents."""

from torch import nn

from tests.zoo import normal


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.left = nn.Sequential(self.cell, nn.Linear(6, 3))
        self.right = nn.Sequential(self.cell, nn.Linear(6, 3))

    def forward(self, x):
        y = self.cell(self.cell(x))
        return self.left(y) + self.right(x) + self.cell(y).sum(-1, keepdim=True)


def build():
    return Twice()


def batch(step):
    return (normal(step, 4, 6),)
