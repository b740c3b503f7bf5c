"""A step of a model whose tensor parallelism is written by hand, of plain modules: `train_by_hand.py FOLDER KIND[:FAULT]…`.

KIND: alone, tensor (halves of each matrix, partial sums that are added up), sequence (the same, with tokens split over the
ranks between the blocks: gathered before each, reduced and scattered behind it). Nothing but the collectives says how an
activation lies over the ranks. FAULT: what the second rank computes wrongly, or what is left out on both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.core.records import Place

WIDTH, WORDS, SAMPLES, TOKENS = 16, 24, 2, 8


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Summed(torch.autograd.Function):
    """The sum of what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Shared(torch.autograd.Function):
    """What all ranks hold alike; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def gathered(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def scattered(x: Tensor, dim: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(world(), dim)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


class Gathered(torch.autograd.Function):
    """The parts of all ranks beside each other; each computes with a part of the weights, so that gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad, ctx.dim), None


class Scattered(torch.autograd.Function):
    """The sum over all ranks, of which each keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return scattered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.dim), None


class Split(torch.autograd.Function):
    """This rank's part of what all hold; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x.chunk(world(), dim)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.dim), None


class Joined(torch.autograd.Function):
    """The parts of all ranks beside each other, of which all compute the same; each keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(world(), ctx.dim)[dist.get_rank()], None


class Block(nn.Module):
    def __init__(self, kind: str, fault: str = "") -> None:
        super().__init__()
        self.kind, self.fault, self.alpha = kind, fault, 1.0
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.kind == "tensor":
            h = Shared.apply(h)
        if self.kind == "sequence":
            h = Gathered.apply(h, 1)
        y = self.down(self.act(self.up(h)))
        if self.kind == "tensor" and self.fault != "reduce":
            y = Summed.apply(y)
        if self.kind == "sequence":
            y = Scattered.apply(y, 1)
        return torch.add(x, y, alpha=self.alpha)


class Model(nn.Module):
    def __init__(self, kind: str, fault: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(kind, fault) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        if self.kind == "sequence":
            h = Split.apply(h, 1)
        for block in self.blocks:
            h = block(h)
        if self.kind == "sequence":
            h = Joined.apply(h, 1)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def halve(model: Model) -> None:
    """Leave this rank its half of the matrices between up and down."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for block in model.blocks:
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            module, _, short = name.partition(".")
            held = getattr(block.get_submodule(module), short)
            setattr(block.get_submodule(module), short, nn.Parameter(held.detach().chunk(ranks, dim)[rank].clone()))


def plant(model: Model, fault: str) -> None:
    block = model.blocks[1]
    if fault == "partial":
        block.down.register_forward_hook(lambda module, given, out: out * 1.05)
    if fault == "residual":
        block.alpha = 1.05
    if fault == "norm":
        block.norm.register_forward_hook(lambda module, given, out: out * 1.05)


def train(output: Path, kind: str = "alone", fault: str = "", level: str = "mix") -> None:
    torch.manual_seed(0)
    model = Model(kind, fault)
    place = None
    if kind != "alone":
        halve(model)
        place = Place(dist.get_rank(), world(), {"tp": (dist.get_rank(), world())})
    if fault and (not dist.is_initialized() or dist.get_rank() == 1):
        plant(model, fault)
    words = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    plan = {"level": level, "summary": "both", "sinks": ["dump"]}
    with trainprobe.Probe(plan, place=place, output=output, console=False) as probe:
        probe.open(model)
        with probe.step():
            model(words[:, :-1], words[:, 1:]).backward()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        recorded, _, fault = layout.partition(":")
        kind, _, level = recorded.partition("+")
        train(Path(sys.argv[1]) / layout, kind, fault, level or "mix")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
