"""Models and data that the programs of the bench share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

END = 0


def stream(seed: int) -> torch.Generator:
    """Return a seeded generator for data."""
    return torch.Generator().manual_seed(seed)


def text(batch: int, time: int, vocab: int, draw: torch.Generator) -> Tensor:
    """Draw sequences [batch, time] int64 over 1..vocab-1 in which each token leaves two for the next."""
    ids = torch.empty(batch, time, dtype=torch.long)
    ids[:, 0] = torch.randint(1, vocab, (batch,), generator=draw)
    for i in range(1, time):
        ids[:, i] = (ids[:, i - 1] * 5 + 3 + torch.randint(0, 2, (batch,), generator=draw)) % (vocab - 1) + 1
    return ids


def causal(time: int) -> Tensor:
    """Return which of [time, time] may be attended to, as bool."""
    return torch.ones(time, time, dtype=torch.bool).tril()


class Block(nn.Module):
    """A transformer block of two heads; the mask is as `scaled_dot_product_attention` takes it."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Token ids [batch, time] to logits [batch, time, vocab]; without a mask of its own."""

    def __init__(self, vocab: int, time: int, width: int = 32, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def features(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """[batch, time] to [batch, time, width]."""
        places = torch.arange(ids.shape[1]) if places is None else places
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def forward(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        return self.head(self.features(ids, mask, places))


class Causal(Transformer):
    """A language model that brings its own causal mask."""

    def forward(self, ids: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        return super().forward(ids, causal(ids.shape[1]) if mask is None else mask, places)


def mlp(*sizes: int, act: Any = nn.ReLU) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b), *([act()] if i < len(sizes) - 2 else [])]
    return nn.Sequential(*layers)


def clusters(batch: int, draw: torch.Generator, classes: int = 5, width: int = 12) -> tuple[Tensor, Tensor]:
    """Draw points [batch, width] around the centres of their classes, and the classes [batch] int64."""
    centres = torch.randn(classes, width, generator=stream(77))
    y = torch.randint(0, classes, (batch,), generator=draw)
    return centres[y] + 0.6 * torch.randn(batch, width, generator=draw), y


def pictures(batch: int, draw: torch.Generator, size: int = 12, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images [batch, 3, size, size] with one bright square each, its class [batch], and its mask [batch, size, size]."""
    x = 0.3 * torch.randn(batch, 3, size, size, generator=draw)
    y = torch.randint(0, classes, (batch,), generator=draw)
    tints = torch.randn(classes, 3, generator=stream(78))
    at = torch.randint(0, size - 4, (batch, 2), generator=draw)
    mask = torch.zeros(batch, size, size, dtype=torch.bool)
    for i, (row, column) in enumerate(at.tolist()):
        mask[i, row : row + 4, column : column + 4] = True
        x[i, :, row : row + 4, column : column + 4] += 1.5 * tints[y[i]][:, None, None]
    return x, y, mask


def convolutions(classes: int = 4, width: int = 16) -> nn.Sequential:
    """Return a small convolutional network for `pictures`: a backbone (0) and a head (1)."""
    backbone = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
    )
    return nn.Sequential(backbone, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)))
