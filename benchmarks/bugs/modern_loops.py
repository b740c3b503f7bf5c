"""Healthy loops of one process with models of further kinds: a vision transformer, an LSTM, diffusion, a teacher."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.bugs.loops import Batch, Loop, Vision, counting, images

VOCABULARY, WIDTH = 24, 16


class Attention(nn.Module):
    """Attention of two heads over the input itself or over a memory; causal on request."""

    def __init__(self, width: int = WIDTH, causal: bool = False) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.causal, self.first_hidden, self.shared_over = causal, 1, -1

    def forward(self, x: Tensor, memory: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """[batch, time, width] to the same; memory: [batch, other time, width]; padding: [batch, other time]."""
        q, k, v = self.q(x), *self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.first_hidden)
            scores = scores.masked_fill(hidden, float("-inf"))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        return self.out((scores.softmax(self.shared_over) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention over itself, over a memory where it has one, and an MLP, each behind a norm."""

    def __init__(self, causal: bool = False, crossed: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.ln_own, self.own, self.drop = nn.LayerNorm(WIDTH), Attention(causal=causal), nn.Dropout(dropout)
        self.ln_other, self.other = (nn.LayerNorm(WIDTH), Attention()) if crossed else (None, None)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, memory: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """[batch, time, width] to the same."""
        x = x + self.drop(self.own(self.ln_own(x), padding=padding if memory is None else None))
        if self.ln_other is not None and self.other is not None:
            x = x + self.drop(self.other(self.ln_other(x), memory, padding))
        return x + self.drop(self.mlp(x))


class VisionTransformer(nn.Module):
    """Four patches and a class token through two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, 8, 8] to logits [batch, 5]."""
        x = self.between(self.patch(x).flatten(2).transpose(1, 2))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)[:, 0])

    def between(self, patches: Tensor) -> Tensor:
        """Hand the patches on."""
        return patches


class Patches(Loop):
    """A vision transformer: two groups, warm-up and cosine, smoothed labels, a halved gradient, an averaged copy."""

    micro = 2

    def build(self) -> nn.Module:
        """Make the model and the copy that is averaged; the first layer learns at half of the pace."""
        model = VisionTransformer()
        self.copy = copy.deepcopy(model).requires_grad_(False).eval()
        model.patch.weight.register_hook(halved)
        return model

    def make_optimizer(self) -> Any:
        """Decay matrices alone."""
        named = list(self.model.named_parameters())
        plain = [p for name, p in named if p.dim() < 2 or name in ("token", "position")]
        rest = [p for name, p in named if not (p.dim() < 2 or name in ("token", "position"))]
        groups = [{"params": rest, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), foreach=True)

    def make_scheduler(self) -> Any:
        """Warm up over five steps, then follow a cosine."""
        parts = [lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(self.optimizer, 300)]
        return lr_scheduler.SequentialLR(self.optimizer, parts, [5])

    def batch(self, step: int, micro: int) -> Batch:
        """Draw images."""
        return images(self.data)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Smooth the labels."""
        return functional.cross_entropy(out, y, label_smoothing=0.1)

    def update(self, step: int) -> None:
        """Step, then average."""
        super().update(step)
        with torch.no_grad():
            for mean, p in zip(self.copy.parameters(), self.averaged_from(step).parameters(), strict=True):
                mean.lerp_(p, 0.1)

    def averaged_from(self, step: int) -> nn.Module:
        """Return the model whose weights are averaged."""
        return self.model

    def after(self, step: int) -> None:
        """Evaluate the model and the copy at each third step."""
        if step % 3 == 2:
            self.model.eval()
            with torch.no_grad():
                for model in (self.model, self.copy):
                    model(images(torch.Generator().manual_seed(9))[0])
            self.train_again(step)

    def train_again(self, step: int) -> None:
        """Go back to training."""
        self.model.train()


def halved(gradient: Tensor) -> Tensor:
    """Halve a gradient."""
    return gradient / 2


class Stream(nn.Module):
    """An LSTM of two layers that hands its state on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, 24, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCABULARY)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time] to logits [batch, time, vocabulary]; goes on from the state that the last call left."""
        out, state = self.rnn(self.embedding(tokens), self.state)
        self.state = (state[0].detach(), state[1].detach())
        return self.head(out)


class Streamed(Loop):
    """An LSTM over endless text, cut after ten tokens; SGD, clipped hard; the rate falls when the evaluation stands still."""

    def build(self) -> nn.Module:
        """Make the model."""
        return Stream()

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.SGD(self.model.parameters(), lr=2.0)

    def make_scheduler(self) -> Any:
        """Make the scheduler."""
        return lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=3)

    def schedule(self, step: int) -> None:
        """Wait for the evaluation."""

    def batch(self, step: int, micro: int) -> Batch:
        """Draw tokens."""
        return counting(self.data)

    def clip(self, step: int) -> Tensor | None:
        """Clip."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)

    def after(self, step: int) -> None:
        """Evaluate at each third step from a state of its own."""
        if step % 3 == 2:
            kept, self.model.state = self.model.state, None
            self.model.eval()
            x, y = counting(torch.Generator().manual_seed(9))
            with torch.no_grad():
                self.scheduler.step(self.loss(step, self.model(x), y))
            self.model.train()
            self.model.state = kept


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal: Jordan et al. 2024, kellerjordan.github.io/posts/muon."""

    overwrites = False

    def __init__(self, params: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each matrix by the orthogonal factor of its Nesterov momentum."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    mean.mul_(group["momentum"]).add_(p.grad)
                    if self.overwrites:
                        mean.copy_(orthogonal(mean))
                    p.add_(orthogonal(p.grad + group["momentum"] * mean), alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps of the fifth degree towards the orthogonal factor of [rows, columns]."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


class Restorer(nn.Module):
    """Tells the noise in a point from the point and the share of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU())
        self.enter, self.middle = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.leave = nn.GroupNorm(4, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Points [batch, 12] and times [batch] to noise [batch, 12]."""
        phases = t[:, None] * 2.0 ** torch.arange(4)
        h = functional.silu(self.enter(x) + self.time(torch.cat([phases.sin(), phases.cos()], 1)))
        return self.leave(self.norm(h + functional.silu(self.middle(h))))


class Diffusion(Loop):
    """Noise prediction; Muon for matrices and AdamW for the rest; an exponential average that torch keeps."""

    def build(self) -> nn.Module:
        """Make the model and its average."""
        model = Restorer()
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model

    def make_optimizer(self) -> Any:
        """Make both."""
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        return [
            Muon(matrices, lr=5e-3),
            torch.optim.AdamW([p for p in self.model.parameters() if p.dim() < 2], lr=2e-3, weight_decay=0.0),
        ]

    def make_scheduler(self) -> Any:
        """Make one for each."""
        return [lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step) for optimizer in self.optimizer]

    def clear(self, step: int) -> None:
        """Clear all."""
        self.model.zero_grad()

    def batch(self, step: int, micro: int) -> Batch:
        """Draw points, noise and times; the noise is the target."""
        kinds = torch.randint(0, 5, (16,), generator=self.data)
        clean = torch.randn(16, 12, generator=self.data) * 0.1 + kinds[:, None]
        noise, self.times = torch.randn_like(clean), torch.rand(16)
        kept = (self.times * 1.5).cos()[:, None]
        return clean * kept + noise * (1 - kept**2).sqrt(), noise

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Tell the times too."""
        return self.called(x, self.times)

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(out, y)

    def update(self, step: int) -> None:
        """Step both, then average."""
        for optimizer in self.optimizer:
            optimizer.step()
        self.average.update_parameters(self.model)

    def schedule(self, step: int) -> None:
        """Step both."""
        for scheduler in self.scheduler:
            scheduler.step()


class Distilled(Vision):
    """A student learns from a teacher in the same module, which is the student's moving average; a centre keeps them apart."""

    micro = 1

    def build(self) -> nn.Module:
        """Make both."""
        student = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))
        model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})
        model.register_buffer("centre", torch.zeros(8))
        return model

    def make_optimizer(self) -> Any:
        """The student is trained."""
        return torch.optim.SGD(self.model["student"].parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Two views, both told by both."""
        views = [x + 0.1 * torch.randn(x.shape, generator=self.data) for _ in range(2)]
        with torch.no_grad():
            told = torch.cat([self.model["teacher"](view) for view in views[::-1]])
            self.aim = ((told - self.model.centre) / 0.1).softmax(-1)
            self.model.centre.lerp_(told.mean(0), 0.1)
        return torch.cat([self.model["student"](view) for view in views])

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy with what the teacher says."""
        return -(self.aim * (out / 0.2).log_softmax(-1)).sum(-1).mean()

    def update(self, step: int) -> None:
        """Step the student; the teacher follows."""
        super().update(step)
        with torch.no_grad():
            for mean, p in zip(self.model["teacher"].parameters(), self.followed(step).parameters(), strict=True):
                mean.lerp_(p, 0.05)

    def followed(self, step: int) -> nn.Module:
        """Return what the teacher follows."""
        return self.model["student"]

    def after(self, step: int) -> None:
        """Evaluate nothing."""
