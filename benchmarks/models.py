"""The two GPTs that speed is measured on, and one training step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.demo.gpt import GPT, Shape, next_token_loss

Scope = Literal["fwd+bwd", "whole step"]


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT, its batch, and how many steps make one timed block of at least a tenth of a second."""

    shape: Shape
    batch: int
    block: int


SIZES = {
    "real": Size(Shape(layers=6, width=384, heads=6, context=256, attention="explicit"), batch=4, block=1),
    "tiny": Size(Shape(layers=4, width=64, heads=4, context=32, attention="explicit"), batch=2, block=20),
}
SCOPES: tuple[Scope, ...] = ("fwd+bwd", "whole step")


@dataclass(frozen=True, slots=True)
class Training:
    """A seeded model with its optimizer; `step(i)` trains on batch i and returns the loss."""

    model: GPT
    optimizer: torch.optim.Optimizer
    step: Callable[[int], Tensor]


def prepare(size: Size, scope: Scope) -> Training:
    """Build a training whose every number is decided by its arguments: two of them run in lockstep give equal bits."""
    torch.manual_seed(0)
    model = GPT(size.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    corpus = read_corpus(1_000_000)
    batches = [
        tuple(map(torch.from_numpy, draw_batch(corpus, i, size.batch, size.shape.context)))  # made before the clock starts
        for i in range(8)
    ]

    def step(i: int) -> Tensor:
        inputs, targets = batches[i % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        if scope == "whole step":
            optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)
