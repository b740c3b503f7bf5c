"""Three kinds of model that incidents happen to: a language model, a classifier with convolutions, an autoencoder.

Each takes seconds on one core. `easy`: without noise in the data, so that the loss comes close to 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Task:
    """A model, its data and its optimizer. layer: the parameter in the middle of it that incidents happen to."""

    layer = ""
    rate = 3e-3

    def __init__(self, seed: int, rank: int = 0, easy: bool = False) -> None:
        torch.manual_seed(seed)
        self.data, self.easy = torch.Generator().manual_seed(seed * 17 + 5 + rank), easy
        self.fixed = torch.Generator().manual_seed(seed)
        self.model = self.build()

    def build(self) -> nn.Module:
        """Make the model."""
        raise NotImplementedError

    def batch(self) -> Batch:
        """Draw inputs and targets."""
        raise NotImplementedError

    def spoilt(self) -> Batch:
        """Draw a bad batch."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate)


class _Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.ln(x))))


class _Language(nn.Module):
    def __init__(self, vocabulary: int, d: int, blocks: int) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(vocabulary, d), nn.ModuleList(_Block(d) for _ in range(blocks))
        self.head = nn.Linear(d, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Language(Task):
    """A residual model of next tokens, 15 % of which are noise."""

    layer = "blocks.1.up.weight"
    VOCABULARY = 48

    def build(self) -> nn.Module:
        """Make it; the rule of the text is a permutation."""
        self.order = torch.randperm(self.VOCABULARY, generator=self.fixed)
        return _Language(self.VOCABULARY, 32, 3)

    def batch(self) -> Batch:
        """Follow the permutation."""
        rows = [torch.randint(0, self.VOCABULARY, (8, 1), generator=self.data)]
        for _ in range(16):
            rows.append(self.order[rows[-1]])
        tokens = torch.cat(rows, 1)
        if not self.easy:
            noise = torch.randint(0, self.VOCABULARY, tokens.shape, generator=self.data)
            tokens = torch.where(torch.rand(tokens.shape, generator=self.data) < 0.15, noise, tokens)
        return tokens[:, :-1], tokens[:, 1:]

    def spoilt(self) -> Batch:
        """Repeat one token."""
        tokens = torch.randint(0, self.VOCABULARY, (8, 1), generator=self.data).expand(8, 17).contiguous()
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


class Images(Task):
    """A small network of convolutions that tells five patterns under noise; SGD with momentum."""

    layer = "3.weight"
    rate = 0.02

    def build(self) -> nn.Module:
        """Make it and the patterns."""
        self.patterns = torch.randn(5, 1, 8, 8, generator=self.fixed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 5),
        )  # fmt: skip

    def batch(self) -> Batch:
        """Draw patterns with noise."""
        kinds = torch.randint(0, 5, (16,), generator=self.data)
        noise = torch.randn(16, 1, 8, 8, generator=self.data)
        return self.patterns[kinds] + noise * (0.3 if self.easy else 1.5), kinds

    def spoilt(self) -> Batch:
        """Give every picture another label."""
        pictures, kinds = self.batch()
        return pictures, (kinds + 1) % 5

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def optimizer(self) -> Any:
        """Make it."""
        return torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)


class Points(Task):
    """An autoencoder of points on a curved surface; the mean squared error."""

    layer = "4.weight"

    def build(self) -> nn.Module:
        """Make it and the surface."""
        self.surface = torch.randn(3, 16, generator=self.fixed)
        return nn.Sequential(
            nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 16)
        )

    def batch(self) -> Batch:
        """Draw points."""
        points = torch.sin(torch.randn(16, 3, generator=self.data) @ self.surface * 0.5)
        return points, points if self.easy else points + 0.3 * torch.randn(points.shape, generator=self.data)

    def spoilt(self) -> Batch:
        """Draw points that were never scaled."""
        points = 8 * torch.randn(16, 16, generator=self.data)
        return points, points

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error."""
        return functional.mse_loss(self.model(batch[0]), batch[1])


TASKS: dict[str, type[Task]] = {"language": Language, "images": Images, "points": Points}
