"""Healthy loops over two ranks that hold different parts of a model: tensor-parallel, pipelined, with experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bugs.loops import Batch, Loop, counting
from trainprobe.engine.core.records import Place

VOCABULARY, WIDTH = 24, 16


class Copied(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape to the same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The sum."""
        g = g.clone()
        dist.all_reduce(g)
        return g


class Summed(torch.autograd.Function):
    """The sum over the ranks; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape to the same."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The same for all."""
        return g


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each weight by the sign of an interpolation of momentum and gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(torch.sign(mean.lerp(p.grad, 1 - first)), alpha=-group["lr"])
                    mean.lerp_(p.grad, 1 - second)


class SplitBlock(nn.Module):
    """A norm and an MLP with biases, whose inner width is split over the ranks."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank = rank
        self.ln = nn.LayerNorm(WIDTH)
        up, down = torch.randn(4 * WIDTH, WIDTH) * 0.2, torch.randn(WIDTH, 4 * WIDTH) * 0.1
        self.up, self.up_bias = nn.Parameter(up.chunk(world, 0)[rank].clone()), nn.Parameter(torch.zeros(4 * WIDTH // world))
        self.down, self.down_bias = nn.Parameter(down.chunk(world, 1)[rank].clone()), nn.Parameter(torch.full((WIDTH,), 0.01))
        self.enter, self.leave, self.drop = Copied.apply, Summed.apply, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same; dropout draws the same on all ranks."""
        h = functional.gelu(self.enter(self.ln(x)) @ self.up.T + self.up_bias)
        return x + self.drop(self.joined(h @ self.down.T))

    def joined(self, partial: Tensor) -> Tensor:
        """Sum the partial products, then add the bias once."""
        return self.leave(partial) + self.down_bias


class SplitModel(nn.Module):
    """Embeddings, two split blocks, and a head whose vocabulary is split."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(SplitBlock(rank, world) for _ in range(2))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Parameter((torch.randn(VOCABULARY, WIDTH) * 0.1).chunk(world, 0)[rank].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to this rank's logits [batch, time, vocabulary / ranks]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return Copied.apply(self.ln(x)) @ self.head.T


class Split(Loop):
    """Two tensor-parallel ranks: biases, dropout, a split vocabulary, Lion."""

    ranks = 2
    SPLIT = ("up", "up_bias", "down", "head")

    def build(self) -> nn.Module:
        """Make the model."""
        return SplitModel(self.rank, self.world)

    def make(self, seed: int) -> None:
        """Make all, then start one random stream for both ranks."""
        super().make(seed)
        torch.manual_seed(77 + self.seed)

    def open(self) -> None:
        """Both ranks draw the same dropout, as what they drop out is replicated."""
        torch.manual_seed(77 + self.seed)
        super().open()

    def place(self) -> Place:
        """Tell where this rank stands."""
        return Place(self.rank, self.world, {"tp": (self.rank, self.world)})

    def data_seed(self) -> int:
        """Both ranks work on the same data."""
        return 100 + 1000 * self.seed

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return Lion(self.model.parameters(), lr=1e-3)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy over a vocabulary that is split: Shoeybi et al. 2019, section 3."""
        own = VOCABULARY // self.world
        top = out.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        local = y - self.rank * own
        here = (local >= 0) & (local < own)
        logit = torch.where(here, out.gather(-1, local.clamp(0, own - 1)[..., None])[..., 0] - top, 0.0)
        total = (out - top[..., None]).exp().sum(-1)
        return (self.over_ranks(step, total).log() - Summed.apply(logit)).mean()

    def over_ranks(self, step: int, total: Tensor) -> Tensor:
        """Sum the exponentials over the whole vocabulary."""
        return Summed.apply(total)

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model."""
        split, whole = torch.zeros(()), torch.zeros(())
        for name, p in self.model.named_parameters():
            square = p.grad.square().sum()
            split, whole = (split + square, whole) if name.split(".")[-1] in self.SPLIT else (split, whole + square)
        dist.all_reduce(split)
        norm = (split + whole).sqrt()
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        return norm


class Stage(nn.Module):
    """One of two pipeline stages; both hold the embedding, the last as its head."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.last = rank == 1
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(rank): nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())})

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or the hidden states of the stage before, to hidden states or logits."""
        x = x if self.last else self.wte(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x @ self.wte.weight.T if self.last else x


class Staged(Loop):
    """Two ranks that hold different stages of one model."""

    ranks = 2

    def place(self) -> Place:
        """Tell where this rank stands."""
        return Place(self.rank, self.world, {"pp": (self.rank, self.world)})

    def data_seed(self) -> int:
        """Both ranks draw the same data: one takes the inputs, the other the targets."""
        return 100 + 1000 * self.seed


class Pipeline(Staged):
    """Two stages and two micro-batches: all forwards, then all backwards, then the tied embedding is summed."""

    micro = 2

    def build(self) -> nn.Module:
        """Both ranks draw the same embedding."""
        return Stage(self.rank)

    def step(self, step: int) -> None:
        """One update."""
        self.clear(step)
        batches = [counting(self.data) for _ in range(self.micro)]
        total = torch.zeros(())
        for i, (x, y) in enumerate(batches):
            if self.probe:
                self.probe.moment("micro", i)
            total = total + (self.first(x) if self.rank == 0 else self.second(step, y))
        dist.broadcast(total, 1)
        self.reduce(step)
        norm = self.clip(step)
        self.update(step)
        self.schedule(step)
        if self.probe:
            self.probe.note("loss", total)
            self.probe.note("grad_norm", norm)

    def first(self, x: Tensor) -> Tensor:
        """Forward, send, receive the gradient, backward."""
        hidden = self.called(x)
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)
        return torch.zeros(())

    def second(self, step: int, y: Tensor) -> Tensor:
        """Receive, forward, backward, send the gradient."""
        got = torch.empty(*y.shape, WIDTH)
        dist.recv(got, 0)
        hidden = self.received(step, got).requires_grad_()
        loss = functional.cross_entropy(self.called(hidden).flatten(0, 1), y.flatten()) / self.micro
        loss.backward()
        dist.send(hidden.grad, 0)
        return loss.detach()

    def received(self, step: int, hidden: Tensor) -> Tensor:
        """Take what came."""
        return hidden

    def reduce(self, step: int) -> None:
        """Sum the embedding's gradient over the stages that hold it."""
        dist.all_reduce(self.model.wte.weight.grad)

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model."""
        counted = [p.grad for name, p in self.model.named_parameters() if self.rank == 0 or name != "wte.weight"]
        norm = self.over_ranks(step, torch.stack([g.square().sum() for g in counted]).sum()).sqrt()
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.2 / (norm + 1e-6), max=1.0))
        return norm

    def over_ranks(self, step: int, square: Tensor) -> Tensor:
        """Sum over the stages."""
        dist.all_reduce(square)
        return square


class Gathered(torch.autograd.Function):
    """All ranks' tokens; the gradient is summed over the ranks and cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[tokens, ...] to [ranks * tokens, ...]."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """This rank's rows of the sum."""
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class Scattered(torch.autograd.Function):
    """This rank's rows of the sum over the ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[ranks * tokens, ...] to [tokens, ...]."""
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The other way round."""
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class Mixture(nn.Module):
    """Embedding, a router, one expert a rank, and a head."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.wte, self.router, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, world),
            nn.Linear(WIDTH, VOCABULARY),
        )
        all_experts = [nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(world)]
        self.experts = nn.ModuleDict({str(rank): all_experts[rank]})

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]."""
        x = self.wte(tokens).flatten(0, 1)
        gates = self.gates(self.router(x).softmax(-1))
        everybody, weights = Gathered.apply(x), Gathered.apply(gates)
        own = self.experts[str(self.rank)](everybody) * weights[:, self.rank : self.rank + 1]
        return self.head(x + Scattered.apply(own)).view(*tokens.shape, -1)

    def gates(self, shares: Tensor) -> Tensor:
        """Keep the largest share of each token."""
        return shares * (shares == shares.amax(-1, keepdim=True))


class Experts(Loop):
    """Two ranks with data and one expert each; what both hold is averaged."""

    ranks = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Mixture(self.rank, self.world)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def reduce(self, step: int) -> None:
        """Average what is replicated; an expert has seen the tokens of both ranks."""
        for name, p in self.model.named_parameters():
            if name.startswith("experts"):
                p.grad.div_(self.world)
            elif p.grad is not None:
                self.average_one(step, name, p.grad)

    def average_one(self, step: int, name: str, grad: Tensor) -> None:
        """Average one gradient over the ranks."""
        dist.all_reduce(grad)
        grad.div_(self.world)

    def clip(self, step: int) -> Tensor | None:
        """Clip nothing."""
        return None
