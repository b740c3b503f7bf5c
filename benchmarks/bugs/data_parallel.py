"""A small GPT on two data-parallel ranks: ragged micro-batches, dropout, clipping, a schedule, evaluations. Healthy as it
stands.

A bug is a subclass that overrides one of these methods.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainprobe.engine.core.records import Place

VOCAB, WIDTH, CONTEXT, LAYERS, MICRO = 48, 24, 12, 2, 2


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.fc2(functional.gelu(self.fc1(self.ln2(x)))))


class GPT(nn.Module):
    """Embeddings, blocks, and a head that is tied to the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


Batch = tuple[Tensor, Tensor]  # tokens, targets; a target of -100 does not count


class DataParallelRun:
    """See the module text. begins: the step at which the bug, if it is one, first does harm."""

    begins = 3
    steps = 8

    def __init__(self, rank: int, world: int, probe_of: Any) -> None:
        self.rank, self.world = rank, world
        torch.manual_seed(11)
        self.model = GPT()
        self.data = torch.Generator().manual_seed(self.data_seed())
        self.ddp = self.wrap()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        torch.manual_seed(1000 + rank)
        self.place = Place(rank, world, {"dp": (rank, world)})
        self.probe = probe_of(self.ddp, self.optimizer, self.place)

    def run(self) -> None:
        """Train."""
        for step in range(self.steps):
            self.before(step)
            with self.probe.step(step) if self.probe else contextlib.nullcontext():
                self.step(step)
            if step % 3 == 2:
                self.evaluate(step)
            if step == 2:
                self.resume(step)

    def step(self, step: int) -> None:
        """One update from MICRO ragged micro-batches; every token of all ranks weighs the same."""
        self.clear(step)
        batches = [self.batch(step, i) for i in range(MICRO)]
        counted = torch.tensor(float(sum((y >= 0).sum() for _, y in batches)))
        dist.all_reduce(counted)
        self.declare(batches, counted)
        total = torch.zeros(())
        for i, (x, y) in enumerate(batches):
            quiet = (
                self.ddp.no_sync()
                if isinstance(self.ddp, DistributedDataParallel) and i + 1 < MICRO
                else contextlib.nullcontext()
            )
            if self.probe:
                self.probe.moment("micro", i)
            with quiet:
                logits = self.forward(step, x)
                loss = self.loss(step, logits, y, counted)
                loss.backward()
            total = total + loss.detach()
        self.reduced(step)
        norm = self.clip(step)
        self.before_update(step)
        self.optimizer.step()
        if self.probe:
            self.probe.note("loss", total / self.world)
            self.probe.note("grad_norm", norm)
        self.schedule(step)

    def declare(self, batches: list[Batch], counted: Tensor) -> None:
        """Declare this rank's loss: the mean over all tokens of all ranks, times the ranks because gradients are averaged."""
        if self.probe:
            parts = list(batches)
            self.probe.declare_loss(lambda model: sum(nll(model(x), y) for x, y in parts) * self.world / counted)

    # ---- what a bug may override ---------------------------------------------------------------------------------

    def data_seed(self) -> int:
        """Return the seed of this rank's data."""
        return 100 + self.rank

    def wrap(self) -> nn.Module:
        """Wrap the model for data parallelism."""
        return DistributedDataParallel(self.model)

    def before(self, step: int) -> None:
        """Do what happens ahead of a step."""

    def clear(self, step: int) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)

    def batch(self, step: int, micro: int) -> Batch:
        """Return a micro-batch whose rows end early, as padded ones do."""
        start = torch.randint(0, VOCAB, (3, 1), generator=self.data)
        tokens = (start + torch.arange(CONTEXT + 1) * torch.randint(1, 4, (3, 1), generator=self.data)) % VOCAB
        length = torch.randint(2, CONTEXT, (3, 1), generator=self.data)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x, torch.where(torch.arange(CONTEXT) < length, y, -100)

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Call the model."""
        return self.ddp(x)

    def loss(self, step: int, logits: Tensor, y: Tensor, counted: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return nll(logits, y) * self.world / counted

    def reduced(self, step: int) -> None:
        """Do what happens once the gradients are reduced."""

    def clip(self, step: int) -> Tensor:
        """Clip, and return the norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def before_update(self, step: int) -> None:
        """Do what happens between clipping and the update."""

    def schedule(self, step: int) -> None:
        """Step the learning-rate scheduler."""
        self.scheduler.step()

    def evaluate(self, step: int) -> None:
        """Evaluate, and go on training."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.arange(CONTEXT)[None])
        self.model.train()

    def resume(self, step: int) -> None:
        """Save and load the training, as a restart does."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def rate(step: int) -> float:
    """Return the declared schedule: warm-up and cosine."""
    return min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / 40))


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Return the summed negative log-likelihood of the targets that count."""
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
