"""A step of a small GPT whose parallelism is written by hand, of plain modules: `train_gathered.py FOLDER KIND[+PLAN][:FAULT]`.

KIND: alone; gathered (halves of each matrix; the logits are gathered), vocab (the same with a loss of logits that stay in
halves), functional (gathered, by functional collectives), sequence (tokens in halves between the matrices, gathered and reduced
into one), ulysses (tokens in halves, exchanged for heads around attention), exchanged (ulysses by functional collectives).
The table of words is in halves too, but with ulysses. Nothing but the collectives says how an activation lies over the ranks.
PLAN: level and what is kept of a value, as in L1-tensor. FAULT: see the uses of `fault`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.core.records import Place

WIDTH, HEADS, WORDS, SAMPLES, TOKENS = 16, 4, 24, 2, 8
PLANS: dict[str, dict[str, Any]] = {
    "statistics": {"summary": "statistics"},
    "both": {"summary": "both"},
    "tensor": {"task": "tensor", "summary": "statistics"},
}
SPLITS_TOKENS = ("ulysses", "exchanged")


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Collectives:
    """What ranks do together, by functions of torch.distributed that write where they are told."""

    def summed(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    def largest(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def gathered(self, x: Tensor, dim: int, order: int = 1) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::order], dim)

    def tokens(self, x: Tensor) -> Tensor:
        whole = x.new_empty(x.shape[0] * world(), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        mine = x.new_empty(x.shape[0] // world(), *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x.contiguous())
        return mine

    def exchanged(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out


class Functional(Collectives):
    """The same by functional collectives, whose results are waited for when they are used."""

    def summed(self, x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)

    def gathered(self, x: Tensor, dim: int, order: int = 1) -> Tensor:
        whole = functional_collectives.all_gather_tensor(x.contiguous(), dim, dist.group.WORLD)
        return torch.cat(whole.chunk(world(), dim)[::-1], dim) if order < 0 else whole

    def exchanged(self, x: Tensor) -> Tensor:
        return functional_collectives.all_to_all_single(x, None, None, dist.group.WORLD)


def own(x: Tensor, dim: int) -> Tensor:
    return x.chunk(world(), dim)[rank()].contiguous()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        return by.summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.by.summed(grad), None


class Gathered(torch.autograd.Function):
    """The parts of all ranks along a dimension, of which all compute the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, by: Collectives, order: int) -> Tensor:
        ctx.dim = dim
        return by.gathered(x, dim, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return own(grad, ctx.dim), None, None, None


class Tokens(torch.autograd.Function):
    """The tokens of all ranks; each computes with a part of the weights, so that gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        ctx.by = by
        return by.tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.by.sum_of_tokens(grad), None


class SumOfTokens(torch.autograd.Function):
    """The sum over all ranks, of which each keeps its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        ctx.by = by
        return by.sum_of_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.by.tokens(grad), None


class Own(torch.autograd.Function):
    """This rank's tokens of what all hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        ctx.by = by
        return own(x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.by.tokens(grad), None


class AllTokens(torch.autograd.Function):
    """The tokens of all ranks, of which all compute the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Collectives) -> Tensor:
        return by.tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own(grad, 0), None


class Exchanged(torch.autograd.Function):
    """Dimension `apart` is split over the ranks instead of dimension `joined`, each 0 (tokens) or 2 (heads)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apart: int, joined: int, by: Collectives, order: list[int]) -> Tensor:
        ctx.dims, ctx.by, ctx.order = (apart, joined), by, order
        return exchange(x, apart, joined, by, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return exchange(grad, ctx.dims[1], ctx.dims[0], ctx.by, ctx.order), None, None, None, None


def exchange(x: Tensor, apart: int, joined: int, by: Collectives, order: list[int]) -> Tensor:
    """Return what is split along `joined` instead. order: in which the parts that arrive are put together."""
    sent = torch.stack(x.chunk(world(), apart)).contiguous()
    arrived = by.exchanged(sent).unbind(0)
    return torch.cat([arrived[i] for i in order], joined)


class VocabLoss(torch.autograd.Function):
    """Cross entropy of logits of which each rank holds those of its words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, by: Collectives) -> Tensor:
        here = logits.shape[-1]
        logits = logits - by.largest(logits.max(-1).values)[..., None]
        place = y - rank() * here
        mine = (place >= 0) & (place < here)
        place = place.clamp(0, here - 1)
        chosen = by.summed(logits.gather(-1, place[..., None])[..., 0] * mine)
        weights = logits.exp()
        total = by.summed(weights.sum(-1))
        ctx.save_for_backward(weights / total[..., None], place, mine)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weights, place, mine = ctx.saved_tensors
        found = weights.scatter_add(-1, place[..., None], -mine[..., None].to(weights))
        return found * grad / place.numel(), None, None


class Words(nn.Embedding):
    """The table of words, of which a rank may hold a part."""

    def forward(self, x: Tensor) -> Tensor:
        if self.num_embeddings == WORDS:
            return super().forward(x)
        place = x - rank() * self.num_embeddings
        elsewhere = (place < 0) | (place >= self.num_embeddings)
        return super().forward(place.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0)


class Core(nn.Module):
    """Attention within heads, [tokens, samples, heads, width of a head]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    def __init__(self, kind: str, fault: str = "") -> None:
        super().__init__()
        self.kind, self.fault = kind, fault
        self.by = Functional() if kind in ("functional", "exchanged") else Collectives()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.core = Core()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def begin(self, h: Tensor) -> Tensor:
        """Hand something on to matrices of which each rank holds a part."""
        if self.kind == "sequence":
            return Tokens.apply(h, self.by)
        return h if self.kind in ("alone", *SPLITS_TOKENS) else Shared.apply(h, self.by)

    def end(self, h: Tensor) -> Tensor:
        if self.kind == "sequence":
            return SumOfTokens.apply(h, self.by)
        return h if self.kind in ("alone", *SPLITS_TOKENS) else Summed.apply(h, self.by)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind not in SPLITS_TOKENS:
            return self.core(q, k, v)
        order = [*range(world())]
        k = k.roll(rank(), 2) if self.fault == "heads" else k
        q, k, v = (Exchanged.apply(x, 2, 0, self.by, order[::-1] if self.fault == "order" else order) for x in (q, k, v))
        return Exchanged.apply(self.core(q, k, v), 0, 2, self.by, order)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(self.norm(x))
        q, k, v = (linear(h).unflatten(-1, (-1, WIDTH // HEADS)) for linear in (self.q, self.k, self.v))
        x = x + self.end(self.out(self.attention(q, k, v).flatten(2)))
        return x + self.end(self.down(self.act(self.up(self.begin(self.norm2(x))))))


class Model(nn.Module):
    def __init__(self, kind: str, fault: str = "") -> None:
        super().__init__()
        self.kind, self.fault = kind, fault
        self.embed, self.head = Words(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(kind, fault if place == 1 else "") for place in range(2))
        self.by = self.blocks[0].by

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        if self.kind not in ("alone", *SPLITS_TOKENS):
            h = Summed.apply(h, self.by)
        if self.kind == "sequence":
            h = Own.apply(h, self.by)
        for block in self.blocks:
            h = block(h)
        if self.kind == "sequence":
            h = AllTokens.apply(h, self.by)
        if self.kind in ("gathered", "functional", "vocab", "sequence"):
            h = Shared.apply(h, self.by)
        logits = self.head(h)
        if self.kind == "vocab":
            return VocabLoss.apply(logits, y, self.by)
        if self.kind in ("gathered", "functional", "sequence"):
            order = -1 if self.fault == "order" else 1
            missing = self.fault == "missing"
            logits = torch.cat([logits] * world(), -1) if missing else Gathered.apply(logits, -1, self.by, order)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def halve(model: Model, fault: str) -> None:
    """Leave this rank its half of the matrices."""
    split = {"embed.weight": 0, "head.weight": 0}
    for i in range(len(model.blocks)):
        split |= {f"blocks.{i}.{name}.weight": 0 for name in ("q", "k", "v", "up")}
        split |= {f"blocks.{i}.up.bias": 0, f"blocks.{i}.out.weight": 1, f"blocks.{i}.down.weight": 1}
    for name, dim in split.items():
        module, _, short = name.rpartition(".")
        held = getattr(model.get_submodule(module), short).detach()
        mine = own(held.roll(1, 0) if (fault, name, rank()) == ("split", "blocks.1.up.weight", 1) else held, dim)
        mine = mine.roll(1, 0) if (fault, name, rank()) == ("rows", "head.weight", 1) else mine
        setattr(model.get_submodule(module), short, nn.Parameter(mine.clone()))
    model.embed.num_embeddings = WORDS // world()


def train(output: Path, kind: str = "alone", fault: str = "", plan: str = "mix-both") -> None:
    torch.manual_seed(0)
    model, place = Model(kind, fault), None
    if kind in SPLITS_TOKENS:
        place = Place(rank(), world(), {"sp": (rank(), world())})
    elif kind != "alone":
        halve(model, fault)
        place = Place(rank(), world(), {"tp": (rank(), world())})
    words = torch.randint(WORDS, (TOKENS + 1, SAMPLES), generator=torch.Generator().manual_seed(3))
    x, y = words[:-1], words[1:]
    if kind in SPLITS_TOKENS:
        x, y = own(x, 0), own(y, 0)
    level, _, kept = plan.partition("-")
    asked = {"level": level, **PLANS[kept or "both"], "sinks": ["dump"]}
    with trainprobe.Probe(asked, place=place, output=output, console=False) as probe:
        probe.open(model)
        with probe.step():
            model(x, y).backward()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        recorded, _, fault = layout.partition(":")
        kind, _, plan = recorded.partition("+")
        train(Path(sys.argv[1]) / layout, kind, fault, plan or "mix-both")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
