"""Healthy loops over two ranks with virtual pipeline stages, and with the sequence split over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bugs.loops import Batch, Loop, counting
from benchmarks.bugs.parallel_loops import VOCABULARY, WIDTH, Gathered, Staged
from trainprobe.engine.core.records import Place

STAGES = 4


class Chunk(nn.Module):
    """A virtual stage: the first embeds, the last has a head."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.1))
        self.layers = nn.ModuleDict({str(stage): inner})
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states or logits."""
        x = x if self.wte is None else self.wte(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x if self.head is None else self.head(x)


class Interleaved(Staged):
    """Four virtual stages on two ranks, each of which holds two of them; a step is one micro-batch, there and back."""

    ranks = 2

    def build(self) -> nn.Module:
        """Make this rank's chunks; all ranks draw all stages."""
        stages = [Chunk(stage) for stage in range(STAGES)]
        return nn.ModuleList(stages[self.rank :: self.world])

    def open(self) -> None:
        """Hand over the list of chunks."""
        self.probe = self.probe_of(list(self.model), self.optimizer, self.place())

    def step(self, step: int) -> None:
        """One update."""
        self.clear(step)
        x, y = counting(self.data)
        loss = self.there(x, y)
        self.back(loss)
        total = torch.zeros(()) if loss is None else loss.detach().clone()
        dist.broadcast(total, 1)
        norm = self.clip(step)
        self.update(step)
        self.schedule(step)
        if self.probe:
            self.probe.note("loss", total)
            self.probe.note("grad_norm", norm)

    def there(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Run all stages forward; return the loss where the last one is."""
        self.entered: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}
        for stage in range(STAGES):
            if stage % self.world == self.rank:
                hidden = x
                if stage:
                    hidden = torch.empty(*x.shape, WIDTH)
                    dist.recv(hidden, (stage - 1) % self.world)
                    hidden.requires_grad_()
                out = self.model[stage // self.world](hidden)
                self.entered[stage], self.left[stage] = hidden, out
                if stage + 1 < STAGES:
                    dist.send(out.detach(), (stage + 1) % self.world)
        last = self.left.get(STAGES - 1)
        return None if last is None else functional.cross_entropy(last.flatten(0, 1), y.flatten())

    def back(self, loss: Tensor | None) -> None:
        """Run all stages backward."""
        for stage in reversed(range(STAGES)):
            if stage % self.world == self.rank:
                if stage + 1 == STAGES:
                    assert loss is not None
                    loss.backward()
                else:
                    grad = torch.empty_like(self.left[stage])
                    dist.recv(grad, (stage + 1) % self.world)
                    self.left[stage].backward(grad)
                if stage:
                    dist.send(self.entered[stage].grad, (stage - 1) % self.world)

    def clip(self, step: int) -> Tensor | None:
        """Clip by the norm of the whole model."""
        square = torch.stack([p.grad.square().sum() for p in self.model.parameters()]).sum()
        dist.all_reduce(square)
        for p in self.model.parameters():
            p.grad.mul_(torch.clamp(0.2 / (square.sqrt() + 1e-6), max=1.0))
        return square.sqrt()

    def after(self, step: int) -> None:
        """Evaluate at each third step."""
        if step % 3 == 2:
            self.model.eval()
            with torch.no_grad():
                self.there(*counting(torch.Generator().manual_seed(9)))
            self.train_again(step)

    def train_again(self, step: int) -> None:
        """Go back to training."""
        self.model.train()


class LongModel(nn.Module):
    """One attention layer and an MLP on this rank's part of the sequence; keys and values of all parts are gathered."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.ln, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time / ranks] to logits [batch, time / ranks, vocabulary]."""
        own = torch.arange(tokens.shape[1]) + self.first(tokens.shape[1])
        x = self.wte(tokens) + self.wpe(own)
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        k, v = (self.gathered(t) for t in (k, v))
        later = torch.arange(k.shape[1]) > (torch.arange(tokens.shape[1]) + self.rank * tokens.shape[1])[:, None]
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(later, float("-inf"))
        x = x + self.out(scores.softmax(-1) @ v)
        return self.head(x + self.mlp(x))

    def first(self, length: int) -> int:
        """Return the position of this rank's first token."""
        return self.rank * length

    def gathered(self, part: Tensor) -> Tensor:
        """[batch, time / ranks, width] to [batch, time, width]."""
        return Gathered.apply(part.transpose(0, 1)).transpose(0, 1)


class Long(Loop):
    """Two ranks with half of each sequence; the loss of a step is the mean over the real tokens of both."""

    ranks = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return LongModel(self.rank, self.world)

    def place(self) -> Place:
        """Tell where this rank stands."""
        return Place(self.rank, self.world, {"cp": (self.rank, self.world)})

    def data_seed(self) -> int:
        """Both ranks draw the same sequences."""
        return 100 + 1000 * self.seed

    def batch(self, step: int, micro: int) -> Batch:
        """Draw ragged sequences and keep this rank's half of their time."""
        x, y = counting(self.data)
        lengths = torch.randint(4, 11, (len(x), 1), generator=self.data)
        y = y.masked_fill(torch.arange(x.shape[1]) >= lengths, -100)
        self.real = int((y != -100).sum())
        return x.chunk(self.world, 1)[self.rank], y.chunk(self.world, 1)[self.rank]

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return this rank's share of the mean over all tokens."""
        total = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
        self.total = total.detach()
        return total / self.counted(step, y)

    def counted(self, step: int, y: Tensor) -> float:
        """Return what the sum of a rank is divided by."""
        return self.real

    def reduce(self, step: int) -> None:
        """Sum the gradients of both halves."""
        for name, p in self.model.named_parameters():
            self.sum_one(step, name, p.grad)

    def sum_one(self, step: int, name: str, grad: Tensor) -> None:
        """Sum one gradient over the ranks."""
        dist.all_reduce(grad)

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note the mean over the real tokens of both halves."""
        total = self.total.clone()
        dist.all_reduce(total)
        super().report(step, total / self.real, norm)
