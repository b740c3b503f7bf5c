"""Healthy loops of several styles, for bugs that override one of their methods: one process, two data-parallel ranks.

Nothing is declared to the probe but what a plain loop notes: loss, gradient norm, the beginnings of micro-batches.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainprobe.engine.core.records import Place

Batch = tuple[Tensor, Tensor]


class Loop:
    """A loop of one optimizer.

    begins: the step at which the bug, if it is one, first does harm. ranks: how many it needs. seed: of weights, data, dropout.
    """

    begins = 3
    steps = 15
    ranks = 1
    micro = 1
    seed = 21
    plan: dict[str, Any] = {"level": "off", "audit": {"every": 1}, "monitor": True, "sinks": []}  # noqa: RUF012

    def __init__(self, rank: int, world: int, probe_of: Any) -> None:
        self.rank, self.world, self.probe_of = rank, world, probe_of
        self.data = torch.Generator().manual_seed(self.data_seed())
        self.make(self.seed)
        torch.manual_seed(500 + rank + 1000 * self.seed)
        self.open()

    def make(self, seed: int) -> None:
        """Make model, optimizer and scheduler."""
        torch.manual_seed(seed)
        self.model = self.build()
        self.called = self.wrap()
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler()

    def open(self) -> None:
        """Hand them to the probe."""
        self.probe = self.probe_of(self.called, self.optimizer, self.place())

    def restart(self, state: dict[str, Any]) -> None:
        """Go on as another process would that loads this state from a file: made anew from another seed, under a new probe."""
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        saved = torch.load(file)
        if self.probe:
            self.probe.close()
        self.make(99)
        self.load(saved)
        self.open()

    def load(self, saved: dict[str, Any]) -> None:
        """Bring everything back."""
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)

    def place(self) -> Place | None:
        """Tell where this rank stands."""
        return Place(self.rank, self.world, {"dp": (self.rank, self.world)}) if self.ranks > 1 else None

    def run(self) -> None:
        """Train."""
        for step in range(self.steps):
            self.before(step)
            with self.probe.step(step) if self.probe else contextlib.nullcontext():
                self.step(step)
            self.after(step)

    def step(self, step: int) -> None:
        """One update."""
        self.clear(step)
        total = torch.zeros(())
        for i in range(self.micro):
            if self.probe and self.micro > 1:
                self.probe.moment("micro", i)
            x, y = self.batch(step, i)
            with self.quiet(step, i):
                loss = self.loss(step, self.forward(step, x), y)
                self.backward(step, self.share(step, loss))
            total = total + loss.detach().float() / self.micro
            self.after_micro(step, i)
        self.reduce(step)
        norm = self.clip(step)
        self.update(step)
        self.schedule(step)
        self.report(step, total, norm)

    # ---- what a style or a bug may override ----------------------------------------------------------------------

    def data_seed(self) -> int:
        """Return the seed of this rank's data."""
        return 100 + self.rank + 1000 * self.seed

    def build(self) -> nn.Module:
        """Make the model."""
        raise NotImplementedError

    def wrap(self) -> nn.Module:
        """Return what the loop calls."""
        return self.model

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def make_scheduler(self) -> Any:
        """Make the scheduler: warm-up over four steps, then a slow decay."""
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.99**step)

    def before(self, step: int) -> None:
        """Do what happens ahead of a step."""

    def after(self, step: int) -> None:
        """Do what happens behind a step."""

    def clear(self, step: int) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def batch(self, step: int, micro: int) -> Batch:
        """Return a micro-batch."""
        raise NotImplementedError

    def quiet(self, step: int, micro: int) -> Any:
        """Return a context in which the forward and backward of a micro-batch run."""
        return contextlib.nullcontext()

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Call the model."""
        return self.called(x)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return functional.cross_entropy(out.flatten(0, -2), y.flatten())

    def share(self, step: int, loss: Tensor) -> Tensor:
        """Return the part of the step's loss that a micro-batch makes."""
        return loss / self.micro

    def backward(self, step: int, loss: Tensor) -> None:
        """Run the backward pass."""
        loss.backward()

    def after_micro(self, step: int, micro: int) -> None:
        """Do what happens behind a micro-batch."""

    def reduce(self, step: int) -> None:
        """Reduce the gradients over the ranks, where no wrapper does."""

    def clip(self, step: int) -> Tensor | None:
        """Clip, and return the norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def update(self, step: int) -> None:
        """Step the optimizer."""
        self.optimizer.step()

    def schedule(self, step: int) -> None:
        """Step the scheduler."""
        self.scheduler.step()

    def report(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note what a plain loop would print."""
        if self.probe:
            self.probe.note("loss", loss)
            if norm is not None:
                self.probe.note("grad_norm", norm)


def images(generator: torch.Generator, count: int = 8) -> Batch:
    """Images [count, 3, 8, 8] of five kinds of stripes, and their kinds."""
    kinds = torch.randint(0, 5, (count,), generator=generator)
    phase = torch.arange(8) * (kinds[:, None] + 1) * 0.7
    stripes = phase.sin()[:, None, None, :].expand(count, 3, 8, 8)
    return stripes + 0.3 * torch.randn(count, 3, 8, 8, generator=generator), kinds


def counting(generator: torch.Generator, count: int = 4, time: int = 10, vocabulary: int = 24) -> Batch:
    """Tokens [count, time] that count in steps of one to three, and the tokens that follow."""
    start, stride = (torch.randint(1, n, (count, 1), generator=generator) for n in (vocabulary, 4))
    tokens = (start + stride * torch.arange(time + 1)) % vocabulary
    return tokens[:, :-1], tokens[:, 1:]


class Vision(Loop):
    """Convolutions with batch normalisation, momentum SGD, two micro-batches a step, evaluations."""

    micro = 2

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 5)),
        )

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw images."""
        return images(self.data)

    def clip(self, step: int) -> Tensor | None:
        """Clip nothing."""
        return None

    def after(self, step: int) -> None:
        """Evaluate at each third step."""
        if step % 3 == 2:
            self.model.eval()
            with torch.no_grad():
                self.model(images(torch.Generator().manual_seed(9))[0])
            self.model.train()


class Tagger(nn.Module):
    """Embedding, GRU, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(24, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]."""
        return self.head(self.rnn(self.embedding(tokens))[0])


class Scaled(Loop):
    """A loop with a GradScaler, which `build` makes: `self.scaler`."""

    scaler: torch.amp.GradScaler

    def backward(self, step: int, loss: Tensor) -> None:
        """Scale."""
        self.scaler.scale(loss).backward()

    def clip(self, step: int) -> Tensor | None:
        """Unscale, then clip."""
        self.scaler.unscale_(self.optimizer)
        return super().clip(step)

    def update(self, step: int) -> None:
        """Step what is finite, and renew the scale."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Recurrent(Scaled):
    """A GRU under autocast with a GradScaler, clipped after unscaling."""

    def build(self) -> nn.Module:
        """Make the model and its scaler."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
        return Tagger()

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def quiet(self, step: int, micro: int) -> Any:
        """Run in bfloat16 where that is safe."""
        return torch.autocast("cpu", torch.bfloat16)


class Language(nn.Module):
    """Embedding, two attention blocks, and a head that is tied to the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(24, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 24, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.wte(tokens) + self.wpe(torch.arange(time))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.ln(x))


class Averaged(Loop):
    """A GPT whose moving average is evaluated in place of the weights, which are put back."""

    def build(self) -> nn.Module:
        """Make the model, and room for its average."""
        self.average: dict[str, Tensor] = {}
        return Language()

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def update(self, step: int) -> None:
        """Step, then average."""
        super().update(step)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.average.setdefault(name, p.clone()).lerp_(p, 0.1)

    def after(self, step: int) -> None:
        """Evaluate the average at each third step."""
        if step % 3 == 2:
            self.model.eval()
            with torch.no_grad():
                kept = {name: p.clone() for name, p in self.model.named_parameters()}
                self.put(self.average)
                self.model(torch.arange(8)[None])
                self.put_back(step, kept)
            self.model.train()

    def put(self, values: dict[str, Tensor]) -> None:
        """Write values into the weights."""
        for name, p in self.model.named_parameters():
            p.copy_(values[name])

    def put_back(self, step: int, kept: dict[str, Tensor]) -> None:
        """Go on with the weights."""
        self.put(kept)


class Wrapped(Vision):
    """The convolutions under DistributedDataParallel on two ranks."""

    ranks = 2

    def wrap(self) -> nn.Module:
        """Wrap."""
        return DistributedDataParallel(self.model)

    def quiet(self, step: int, micro: int) -> Any:
        """Reduce with the last micro-batch."""
        wrapped = self.called
        last = micro + 1 == self.micro
        return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()


class ByHand(Recurrent):
    """The GRU on two ranks whose gradients are averaged by hand between scaling and unscaling."""

    ranks = 2

    def reduce(self, step: int) -> None:
        """Average."""
        for name, p in self.model.named_parameters():
            self.average_one(step, name, p.grad)

    def average_one(self, step: int, name: str, grad: Tensor) -> None:
        """Average one gradient over the ranks."""
        dist.all_reduce(grad)
        grad.div_(self.world)
