"""Healthy trainings that are noisy, or change on purpose: twenty kinds, and each is to be silent."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.incidents.tasks import Images, Language, Points, Task
from benchmarks.incidents.training import PLAN
from trainprobe.watching import watch

STEPS = 240


class Healthy:
    """A loop over steps. `losses` yields, a step, what it backpropagates and what it notes."""

    base = 3e-3

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.data = torch.Generator().manual_seed(seed + 1)
        self.seed = seed
        self.model: Any = self.build()
        self.optimizer = self.make_optimizer()

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))

    def make_optimizer(self) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.base)

    def rate(self, step: int) -> float:
        """Return the learning rate."""
        return self.base

    def randn(self, *shape: int) -> Tensor:
        """Draw."""
        return torch.randn(*shape, generator=self.data)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a step and what else is noted."""
        raise NotImplementedError

    def update(self, step: int, probe: Any) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss, more = self.loss(step)
        loss.backward()
        self.optimizer.step()
        self.tell(probe, loss, more)

    def tell(self, probe: Any, loss: Tensor, more: dict[str, float]) -> None:
        """Note."""
        for name, value in {"loss": loss.detach(), **more}.items():
            probe.note(name, value)

    def after(self, step: int) -> None:
        """Do something between steps."""

    def run(self, folder: Path, steps: int = STEPS) -> None:
        """Train."""
        with watch(self.model, self.optimizer, PLAN, output=str(folder), on_existing="replace") as probe:
            for step in range(steps):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate(step)
                with probe.step(step):
                    self.update(step, probe)
                self.after(step)


class _OfTask(Healthy):
    task: type[Task] = Language

    def build(self) -> nn.Module:
        """Take the task's."""
        self.of = self.task(self.seed)
        return self.of.model

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Take the task's."""
        return self.of.loss(self.of.batch()), {}


class SmallBatches(_OfTask):
    """A language model, one sequence a step."""

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """One sequence."""
        x, y = self.of.batch()
        return self.of.loss((x[:1], y[:1])), {}


class WarmUp(_OfTask):
    """A long warm-up, no clipping."""

    def rate(self, step: int) -> float:
        """Rise for a hundred steps."""
        return self.base * 2 * min(1.0, (step + 1) / 100)


class Restarts(_OfTask):
    """A cosine that begins anew each 60 steps, convolutions under SGD."""

    task, base = Images, 0.05

    def make_optimizer(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=self.base, momentum=0.9)

    def rate(self, step: int) -> float:
        """Restart."""
        return self.base * (0.505 + 0.495 * math.cos(math.pi * (step % 60) / 60))


class Curriculum(_OfTask):
    """The noise of the data is raised at step 130, and `difficulty` tells it."""

    task = Points

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Draw at two difficulties."""
        level = 0.1 if step < 130 else 1.0
        x, _ = self.of.batch()
        return self.of.loss((x, x + level * self.randn(*x.shape))), {"difficulty": level}


class LongerSequences(_OfTask):
    """Sequences grow from 4 to 16 tokens at steps 80 and 160 and the data with them; `sequence length` is noted."""

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Cut sequences; longer ones hold more noise."""
        length = 4 if step < 80 else 8 if step < 160 else 16
        x, y = self.of.batch()
        wrong = torch.rand(y.shape, generator=self.data) < 0.02 * length
        y = torch.where(wrong, torch.randint(0, 48, y.shape, generator=self.data), y)
        return self.of.loss((x[:, :length], y[:, :length])), {"sequence length": float(length)}


class Bootstrapped(Healthy):
    """Values of a random walk with a discount, whose targets come from a copy that follows each 25 steps."""

    def build(self) -> nn.Module:
        """And its copy."""
        model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1))
        self.copy = copy.deepcopy(model)
        return model

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """The temporal difference."""
        state = self.randn(32, 12)
        follows, reward = 0.95 * state + 0.3 * self.randn(32, 12), 1.0 + 0.3 * state[:, :1]
        with torch.no_grad():
            target = reward + 0.97 * self.copy(follows)
        return functional.mse_loss(self.model(state), target), {}

    def after(self, step: int) -> None:
        """Follow."""
        if step % 25 == 24:
            self.copy.load_state_dict(self.model.state_dict())


class SlowTarget(Bootstrapped):
    """The same with a copy that follows at each step by 2 %."""

    def after(self, step: int) -> None:
        """Follow."""
        with torch.no_grad():
            for mine, its in zip(self.copy.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(its, 0.02)


class HeavyTails(Healthy):
    """A regression whose errors have no variance, by its squares."""

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Student's t of 1.5 degrees of freedom."""
        x = self.randn(16, 12)
        chi = self.randn(16, 3).square().sum(1, keepdim=True) / 2
        return functional.mse_loss(self.model(x), x[:, :4] + 0.2 * self.randn(16, 4) / chi.sqrt()), {}


class Dropout(_OfTask):
    """Half of everything is dropped."""

    task = Images

    def build(self) -> nn.Module:
        """Add dropout."""
        model = super().build()
        assert isinstance(model, nn.Sequential)
        return nn.Sequential(*model[:7], nn.Dropout(0.5), *model[7:9], nn.Dropout(0.5), model[9])

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Of the changed model."""
        x, y = self.of.batch()
        return functional.cross_entropy(self.model(x), y), {}


class WrongLabels(_OfTask):
    """A third of the labels is wrong, in bursts of more and fewer."""

    task = Images

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Spoil labels."""
        x, y = self.of.batch()
        share = 0.66 * float(torch.rand((), generator=self.data))
        wrong = torch.rand(y.shape, generator=self.data) < share
        return self.of.loss((x, torch.where(wrong, torch.randint(0, 5, y.shape, generator=self.data), y))), {}


class Evaluated(_OfTask):
    """An evaluation each 20 steps whose loss is noted."""

    task = Points

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Evaluate."""
        more = {}
        if step % 20 == 19:
            self.model.eval()
            with torch.no_grad():
                more = {"val_loss": float(self.of.loss(self.of.batch()))}
            self.model.train()
        return super().loss(step)[0], more


class Adversarial(Healthy):
    """A generator and its critic take turns."""

    base = 1e-3

    def build(self) -> nn.Module:
        """Make both."""
        critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        return nn.ModuleList([nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12)), critic])

    def make_optimizer(self) -> Any:
        """One for each, with one face."""
        makes, judges = (torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in self.model)
        self.both = makes, judges
        return makes

    def update(self, step: int, probe: Any) -> None:
        """Both."""
        makes, judges = self.model
        real = torch.sin(self.randn(16, 12))
        made = makes(torch.randn(16, 4))
        self.both[1].zero_grad()
        lost = functional.softplus(-judges(real)).mean() + functional.softplus(judges(made.detach())).mean()
        lost.backward()
        self.both[1].step()
        self.both[0].zero_grad()
        fooled = functional.softplus(-judges(made)).mean()
        fooled.backward()
        self.both[0].step()
        self.tell(probe, lost, {"generator loss": float(fooled.detach())})


class Policy(Healthy):
    """A policy gradient of a bandit with contexts; its returns are noisy and grow."""

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Sample actions."""
        x = self.randn(16, 12)
        spread = torch.distributions.Categorical(logits=self.model(x))
        action = spread.sample()
        reward = x.gather(1, action[:, None]).squeeze(1) + self.randn(16)
        return -(spread.log_prob(action) * (reward - reward.mean())).mean(), {"reward": float(reward.mean())}


class Accumulated(_OfTask):
    """Gradients of four micro-batches are added up."""

    def update(self, step: int, probe: Any) -> None:
        """Four passes."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for k in range(4):
            probe.moment("micro", k)
            x, y = self.of.batch()
            part = self.of.loss((x[:2], y[:2])) / 4
            part.backward()
            total += part.detach()
        self.optimizer.step()
        self.tell(probe, total, {})


class RareSource(_OfTask):
    """Each batch is of one of two sources; the harder comes now and then."""

    task = Points

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Draw from one of them."""
        x, y = self.of.batch()
        hard = float(torch.rand((), generator=self.data)) < 0.06
        return self.of.loss((x, y + 0.8 * self.randn(*y.shape)) if hard else (x, y)), {}


class ByHeart(_OfTask):
    """Six batches over and over, until they are known by heart."""

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Draw one of six."""
        if step % 6 == 0:
            self.of.data.manual_seed(self.seed)
        return super().loss(step)


class Diffusion(Healthy):
    """Predict noise at a random time, weighed by a signal-to-noise ratio: the loss jumps with the time."""

    def build(self) -> nn.Module:
        """Take the time too."""
        return nn.Sequential(nn.Linear(13, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 12))

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Weigh."""
        x, noise = torch.sin(2 * self.randn(8, 12)), self.randn(8, 12)
        time = torch.rand(8, 1, generator=self.data) * 0.98 + 0.01
        seen = time.sqrt() * x + (1 - time).sqrt() * noise
        weight = (time / (1 - time)).clamp(max=5)
        return (weight * (self.model(torch.cat([seen, time], 1)) - noise).square()).mean(), {}


class Annealed(Healthy):
    """A variational autoencoder; `beta` rises from 0 in a line, and the loss with it."""

    def build(self) -> nn.Module:
        """Make both halves."""
        return nn.ModuleList([nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8)), nn.Linear(4, 12)])

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Add the divergence."""
        x = torch.sin(self.randn(16, 3) @ torch.ones(3, 12)) + 0.1 * self.randn(16, 12)
        mean, log = self.model[0](x).chunk(2, 1)
        out = self.model[1](mean + (log / 2).exp() * self.randn(16, 4))
        divergence = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1).mean()
        beta = min(1.0, max(0.0, (step - 60) / 120))
        return (out - x).square().sum(1).mean() + beta * divergence, {"beta": beta}


class Scaled(_OfTask):
    """float16 with a gradient scaler that searches its scale, and finds its limit each 30 steps."""

    def update(self, step: int, probe: Any) -> None:
        """Scale."""
        if step == 0:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=30)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.of.loss(self.of.batch())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.tell(probe, loss, {})


class EdgeOfStability(_OfTask):
    """SGD at a high rate, all data in each step: the sharpness stays at its limit and the loss wavers."""

    task, base = Points, 0.3

    def make_optimizer(self) -> Any:
        """SGD."""
        self.all = self.of.batch()
        return torch.optim.SGD(self.model.parameters(), lr=self.base, momentum=0.9)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """All data."""
        return self.of.loss(self.all), {}


class Thawed(_OfTask):
    """The first half is frozen until step 100, when it is thawed at a tenth of the rate; `phase` tells it."""

    task = Images

    def build(self) -> nn.Module:
        """Freeze."""
        model = super().build()
        assert isinstance(model, nn.Sequential)
        for p in model[:6].parameters():
            p.requires_grad_(False)
        model[:6].eval()
        return model

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Thaw."""
        if step == 100:
            self.model.train()
            for p in self.model.parameters():
                p.requires_grad_(True)
        return super().loss(step)[0], {"phase": float(step >= 100)}


KINDS: dict[str, type[Healthy]] = {
    "small batches": SmallBatches, "warm-up": WarmUp, "restarts": Restarts, "curriculum": Curriculum,
    "longer sequences": LongerSequences, "bootstrapped": Bootstrapped, "slow target": SlowTarget, "heavy tails": HeavyTails,
    "dropout": Dropout, "wrong labels": WrongLabels, "evaluated": Evaluated, "adversarial": Adversarial, "policy": Policy,
    "accumulated": Accumulated, "rare source": RareSource, "by heart": ByHeart, "diffusion": Diffusion, "annealed": Annealed,
    "scaled": Scaled, "edge of stability": EdgeOfStability, "thawed": Thawed,
}  # fmt: skip


def each(seeds: int, first: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds and their seeds."""
    for kind in KINDS:
        yield from ((kind, seed) for seed in range(first, first + seeds))
