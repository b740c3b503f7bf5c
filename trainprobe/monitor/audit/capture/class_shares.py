"""How often each class is the target of a loss function, and how much probability the model gives to it."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_CLASSES = 1000  # more are the tokens of a language, most of which no sample shows
_ROWS = 1024  # positions of an input [N, C] that are looked at
_ENTRIES = 8  # of each dimension but that of the classes, where there are more


def class_shares(x: Tensor, y: Tensor, ignored: int, *, logarithms: bool) -> Tensor | None:
    """Return float32 [2 C + 1]: how often each class is a target, the sum of its probability, the sum of -log p(target).

    x: [N, C, …], logits, or log-probabilities if `logarithms`. y: class indices [N, …]; where it is `ignored`, nothing counts.
    Places are evenly spaced: at most `_ROWS` of [N, C], otherwise `_ENTRIES` along each dimension. None for other shapes, and
    for fewer than three or more than `MOST_CLASSES` classes.
    """
    if x.dim() < 2 or not 3 <= x.shape[1] <= MOST_CLASSES or y.shape != (x.shape[0], *x.shape[2:]) or not y.numel():
        return None
    most = _ROWS if x.dim() == 2 else _ENTRIES
    for d in (0, *range(2, x.dim())):
        every = slice(None, None, -(-x.shape[d] // most))
        x = x[(slice(None),) * d + (every,)]
        y = y[(slice(None),) * max(0, d - 1) + (every,)]
    logits = x.movedim(1, -1).reshape(-1, x.shape[1]).float()
    target = y.reshape(-1, 1)
    logs = logits if logarithms else logits.log_softmax(1)
    valid = target != ignored
    hit = (target == torch.arange(x.shape[1], device=y.device)) & valid
    mass = logs.exp().masked_fill(~valid, 0.0).sum(0)
    return torch.cat((hit.sum(0).float(), mass, -logs.masked_fill(~hit, 0.0).sum().reshape(1)))
