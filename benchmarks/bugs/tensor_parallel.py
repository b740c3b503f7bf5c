"""Embedding, norms and an MLP on two tensor-parallel ranks, with sequence-parallel norms. Healthy as it stands.

The norms see half of the tokens on each rank, so that their gradients are partial sums until they are all-reduced; weights of
the MLP are sharded, and the norm of all gradients counts each element of the whole model once. A bug is a subclass that
overrides a method.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainprobe.engine.core.records import Place

VOCAB, WIDTH, TIME = 32, 16, 8


class GatherTime(torch.autograd.Function):
    """All-gather along time; the gradient is summed over the ranks and cut again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[batch, time / ranks, width] to [batch, time, width]."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The other way round."""
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class ScatterTime(torch.autograd.Function):
    """Sum over the ranks and keep this rank's part of time; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[batch, time, width] to [batch, time / ranks, width]."""
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The other way round."""
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts, 1)


class Layer(nn.Module):
    """A norm on this rank's tokens and an MLP whose inner width is split over the ranks."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        whole1, whole2 = torch.randn(4 * WIDTH, WIDTH) * 0.2, torch.randn(WIDTH, 4 * WIDTH) * 0.2
        self.fc1 = nn.Parameter(whole1.chunk(world, 0)[rank].clone())
        self.fc2 = nn.Parameter(whole2.chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time / ranks, width] to the same."""
        h = GatherTime.apply(self.ln(x))
        return x + ScatterTime.apply(functional.gelu(h @ self.fc1.T) @ self.fc2.T)


class Model(nn.Module):
    """Embedding, layers, norm and head; each rank returns logits of its own tokens."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(rank, world) for _ in range(2))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time / ranks, vocabulary]."""
        x = self.wte(tokens.chunk(self.world, 1)[self.rank])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


SHARDED = ("fc1", "fc2")


class TensorParallelRun:
    """See the module text. begins: the step at which the bug, if it is one, first does harm."""

    begins = 3
    steps = 8

    def __init__(self, rank: int, world: int, probe_of: Any) -> None:
        self.rank, self.world = rank, world
        torch.manual_seed(5)
        self.model = Model(rank, world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)
        self.place = Place(rank, world, {"tp": (rank, world)})
        self.data = torch.Generator().manual_seed(7)
        self.probe = probe_of(self.model, self.optimizer, self.place)

    def run(self) -> None:
        """Train."""
        for step in range(self.steps):
            with self.probe.step(step) if self.probe else contextlib.nullcontext():
                self.step(step)

    def step(self, step: int) -> None:
        """One update."""
        self.optimizer.zero_grad()
        tokens = torch.randint(0, VOCAB, (4, TIME + 1), generator=self.data)
        logits = self.model(tokens[:, :-1])
        targets = tokens[:, 1:].chunk(self.world, 1)[self.rank]
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / self.world
        loss.backward()
        self.reduce(step)
        norm = self.norm(step)
        self.clip(step, norm)
        self.optimizer.step()
        if self.probe:
            self.probe.note("loss", loss.detach() * self.world)
            self.probe.note("grad_norm", norm)

    def sharded(self, name: str) -> bool:
        """Tell whether a parameter is split over the ranks."""
        return name.split(".")[-1] in SHARDED

    # ---- what a bug may override ---------------------------------------------------------------------------------

    def reduce(self, step: int) -> None:
        """Sum the gradients of what is replicated: each rank saw its own tokens."""
        for name, p in self.model.named_parameters():
            if not self.sharded(name):
                self.reduce_one(step, name, p)

    def reduce_one(self, step: int, name: str, p: nn.Parameter) -> None:
        """Sum one gradient over the ranks."""
        dist.all_reduce(p.grad)

    def norm(self, step: int) -> Tensor:
        """Return the norm of the whole model's gradient."""
        split, whole = torch.zeros(()), torch.zeros(())
        for name, p in self.model.named_parameters():
            if self.sharded(name):
                split = split + p.grad.square().sum()
            else:
                whole = whole + p.grad.square().sum()
        return (self.joined(step, split) + whole).sqrt()

    def joined(self, step: int, split: Tensor) -> Tensor:
        """Sum over the ranks what they hold parts of."""
        dist.all_reduce(split)
        return split

    def clip(self, step: int, norm: Tensor) -> None:
        """Scale the gradients."""
        coefficient = torch.clamp(0.2 / (norm + 1e-6), max=1.0)
        for p in self.model.parameters():
            p.grad.mul_(coefficient)
