"""Healthy loops of two ranks: a sharded optimizer, sums by hand, counted tokens, DTensors, queued micro-batches."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bugs.loops import Batch, Language, Loop, counting, images
from benchmarks.bugs.parallel_loops import (
    VOCABULARY,
    WIDTH,
    Experts,
    Gathered,
    Scattered,
    Split,
    SplitBlock,
    SplitModel,
    Staged,
)
from benchmarks.bugs.precise_loops import IGNORED, Sharded
from benchmarks.bugs.tensor_parallel import GatherTime


class ShardedOptimizer(Loop):
    """A GPT whose gradients are averaged; each rank steps every second parameter and hands it to the other."""

    ranks = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Language()

    def owned(self) -> list[nn.Parameter]:
        """Return what this rank steps."""
        return list(self.model.parameters())[self.rank :: self.world]

    def make_optimizer(self) -> Any:
        """Make the optimizer of this rank's parameters."""
        return torch.optim.AdamW(self.owned(), lr=3e-3)

    def clear(self, step: int) -> None:
        """Clear all."""
        self.model.zero_grad()

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def reduce(self, step: int) -> None:
        """Average."""
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)

    def update(self, step: int) -> None:
        """Step what is owned, then hand it over."""
        super().update(step)
        for i, (name, p) in enumerate(self.model.named_parameters()):
            self.hand_over(step, name, p.data, i % self.world)

    def hand_over(self, step: int, name: str, value: Tensor, owner: int) -> None:
        """Send one parameter."""
        dist.broadcast(value, owner)


class SummedByHand(Loop):
    """Convolutions with group norms; gradients of two micro-batches and two ranks are summed, and divided once."""

    ranks, micro = 2, 2

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.SiLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
        )

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, foreach=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw images."""
        return images(self.data)

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Leave it whole: the gradients are divided."""
        return loss

    def reduce(self, step: int) -> None:
        """Begin all sums, wait for all, divide."""
        named = list(self.model.named_parameters())
        works = [self.begin(step, name, p.grad) for name, p in named]
        for work in works:
            work.wait()
        for name, p in named:
            self.end(step, name, p.grad)

    def clip(self, step: int) -> Tensor | None:
        """Clip what is far out of the ordinary."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)

    def begin(self, step: int, name: str, grad: Tensor) -> Any:
        """Begin one sum."""
        return dist.all_reduce(grad, async_op=True)

    def end(self, step: int, name: str, grad: Tensor) -> None:
        """Divide one."""
        grad.div_(self.world * self.micro)


class Weighted(Loop):
    """A GPT under DistributedDataParallel on ragged sequences: each token of the step weighs the same on all ranks."""

    ranks, micro = 2, 2

    def build(self) -> nn.Module:
        """Make the model."""
        return Language()

    def wrap(self) -> nn.Module:
        """Wrap."""
        return DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw the whole step with the first micro-batch and count the tokens of both ranks."""
        if micro == 0:
            self.drawn = [self.ragged() for _ in range(self.micro)]
            self.own = sum(int((y != IGNORED).sum()) for _, y in self.drawn)
            count = torch.tensor(float(self.own))
            dist.all_reduce(count)
            self.real, self.total = float(count), torch.zeros(())
        return self.drawn[micro]

    def ragged(self) -> Batch:
        """Draw four sequences of three to ten tokens, padded to ten."""
        x, y = counting(self.data)
        padding = torch.arange(x.shape[1]) >= torch.randint(3, 11, (len(x), 1), generator=self.data)
        return x.masked_fill(padding, 0), y.masked_fill(padding, IGNORED)

    def quiet(self, step: int, micro: int) -> Any:
        """Reduce with the last micro-batch."""
        return super().quiet(step, micro) if micro + 1 == self.micro else self.called.no_sync()

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the sum over real tokens."""
        total = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
        self.total = self.total + total.detach()
        return total

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Divide by the tokens of all ranks; the wrapper takes the mean over ranks."""
        return loss * self.world / self.real

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note the mean over all real tokens."""
        dist.all_reduce(self.total)
        super().report(step, self.total / self.real, norm)


class MixedShards(Sharded):
    """fully_shard that computes in bfloat16 and reduces in float32; momentum SGD."""

    def wrap(self) -> nn.Module:
        """Shard each block, and the rest together."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(self.model, mp_policy=policy)

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def clip(self, step: int) -> Tensor | None:
        """Clip what is far out of the ordinary."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 50.0).full_tensor()  # type: ignore[attr-defined]

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss in float32."""
        return super().loss(step, out.float(), y)


class Whole(GatherTime):
    """All ranks' parts of dimension 1, for work that all ranks do alike; the gradient is cut and not summed."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """This rank's part."""
        return g.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class PlacedBlock(nn.Module):
    """A norm on this rank's part of the sequence, and an MLP of which this rank has half, in DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.parted: tuple[Any, ...] | None = (Partial(),)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time / ranks, width] to the same."""
        weight, bias = (p.to_local(grad_placements=self.parted) for p in (self.ln.weight, self.ln.bias))
        h = functional.layer_norm(x, (WIDTH,), weight, bias)
        h = Gathered.apply(h.transpose(0, 1)) @ self.up.weight.to_local().T
        return x + Scattered.apply(functional.gelu(h) @ self.down.weight.to_local().T).transpose(0, 1)


class PlacedModel(nn.Module):
    """A table, two such blocks and a head; the table works on the part of the sequence, the head on the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(PlacedBlock() for _ in range(2))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                dims = {p is b.up.weight: 0 for b in self.blocks} | {p is b.down.weight: 1 for b in self.blocks}
                placement = Shard(dims[True]) if True in dims else Replicate()
                setattr(module, name, nn.Parameter(distribute_tensor(p.data, mesh, [placement])))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary], on all ranks alike."""
        part = tokens.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        x = functional.embedding(part, self.table.weight.to_local(grad_placements=(Partial(),)))
        for block in self.blocks:
            x = block(x)
        return Whole.apply(x) @ self.head.weight.to_local().T


class Placed(Loop):
    """Tensor and sequence parallel in DTensors, of which torch is told where gradients are partial."""

    ranks = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return PlacedModel()

    def data_seed(self) -> int:
        """Both ranks draw the same data."""
        return 100 + 1000 * self.seed

    def place(self) -> Any:
        """Tell where this rank stands."""
        return Split.place(self)  # type: ignore[arg-type]

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Queued(Staged):
    """Two pipeline stages and three micro-batches: all forwards, all backwards in the same order, a tied table."""

    micro = 3

    def build(self) -> nn.Module:
        """Make this rank's stage."""
        table = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)]
        return nn.ModuleDict({"table": table, f"layer{self.rank}": layers[self.rank]})

    def step(self, step: int) -> None:
        """One update."""
        self.clear(step)
        batches = [counting(self.data) for _ in range(self.micro)]
        left: deque[tuple[Tensor, Tensor]] = deque()
        total = torch.zeros(())
        for i, (x, y) in enumerate(batches):
            if self.probe:
                self.probe.moment("micro", i)
            left.append(self.there(x, y))
        while left:
            total = total + self.back(*self.next(step, left))
        dist.broadcast(total, 1)
        dist.all_reduce(self.model["table"].weight.grad)
        norm = self.clip(step)
        self.update(step)
        self.schedule(step)
        self.report(step, total, norm)

    def there(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Run one micro-batch forward; return what entered and what left."""
        layer = self.model[f"layer{self.rank}"]
        if self.rank == 0:
            x = self.model["table"](x)
            out = x + layer(x)
            dist.send(out.detach(), 1)
            return x, out
        hidden = torch.empty(*x.shape, WIDTH)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        logits = (hidden + layer(hidden)) @ self.model["table"].weight.T
        return hidden, functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / self.micro

    def next(self, step: int, left: deque[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Take the oldest."""
        return left.popleft()

    def back(self, entered: Tensor, out: Tensor) -> Tensor:
        """Run one micro-batch backward."""
        if self.rank == 0:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
            return torch.zeros(())
        out.backward()
        dist.send(entered.grad, 0)
        return out.detach()

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model, in which the table counts once."""
        counted = [p.grad for name, p in self.model.named_parameters() if self.rank == 0 or name != "table.weight"]
        square = torch.stack([g.square().sum() for g in counted]).sum()
        dist.all_reduce(square)
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.5 / (square.sqrt() + 1e-6), max=1.0))
        return square.sqrt()


class ClippedExperts(Experts):
    """Experts whose gradients are clipped by the norm of the whole model."""

    def clip(self, step: int) -> Tensor | None:
        """Sum the squares of experts over the ranks."""
        named = list(self.model.named_parameters())
        own = torch.stack([p.grad.square().sum() for name, p in named if name.startswith("experts")]).sum()
        rest = torch.stack([p.grad.square().sum() for name, p in named if not name.startswith("experts")]).sum()
        norm = (self.over_ranks(step, own) + rest).sqrt()
        for _, p in named:
            p.grad.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
        return norm

    def over_ranks(self, step: int, square: Tensor) -> Tensor:
        """Sum over the ranks."""
        dist.all_reduce(square)
        return square


class TrackedBlock(SplitBlock):
    """A split block whose inner dropout draws from a stream of the rank's own."""

    stream: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        h = functional.gelu(self.enter(self.ln(x)) @ self.up.T + self.up_bias)
        shared = torch.get_rng_state()
        torch.set_rng_state(self.stream)
        h = functional.dropout(h, 0.1, self.training)
        self.stream = torch.get_rng_state()
        torch.set_rng_state(shared)
        return x + self.drop(self.joined(h @ self.down.T))


class Tracked(Split):
    """Tensor-parallel ranks that keep a random stream for what is split, as Shoeybi et al. 2019 do."""

    def build(self) -> nn.Module:
        """Make the model."""
        model = SplitModel(self.rank, self.world)
        model.blocks = nn.ModuleList(TrackedBlock(self.rank, self.world) for _ in range(2))
        for i, block in enumerate(model.blocks):
            block.stream = torch.Generator().manual_seed(31 + 10 * i + self.rank).get_state()
        return model
