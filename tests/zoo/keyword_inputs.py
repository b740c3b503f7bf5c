"""Tensors that arrive as keywords, in dicts and in nested lists, defaults, and a mask that is boolean."""

from torch import nn

from tests.zoo import normal


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, *, query, memory, mask=None, scale=1.0):
        scores = self.query(query) @ self.key(memory["keys"][0]).T * scale
        return scores.masked_fill(~mask, 0.0) if mask is not None else scores


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Mixer()
        self.head = nn.Linear(4, 2)

    def forward(self, x, extra):
        y = self.mixer(query=x, memory={"keys": [x * 2, "name"]}, mask=extra["mask"], scale=0.5)
        return self.head(y) + self.head(self.mixer(query=y @ x, memory={"keys": (x,)}))


def build():
    return Keywords()


def batch(step):
    x = normal(step, 4, 6)
    return x, {"mask": normal(step, 4, 4, seed=1) > -0.5}
