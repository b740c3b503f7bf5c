"""Healthy trainings of many kinds under all rules and the audit, with defaults: whatever is told is a false alarm.

python -m benchmarks.healthy --seeds 3 --first-seed 1000
python -m benchmarks.healthy --only gan --every 1
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.bugs.loops import Averaged, Batch, Loop, Recurrent, Vision
from benchmarks.bugs.modern_loops import Diffusion, Distilled, Patches, Streamed
from benchmarks.bugs.parallel_loops import Lion
from benchmarks.bugs.precise_loops import Adapters, Padded, Sixteen
from benchmarks.bugs.token_loops import MainGradients, Policy, Routed, ScaledTwice, Translator
from benchmarks.bugs.unseen import Closure, Masters, Pair
from trainprobe.demo.corpus import draw_batch, read_corpus
from trainprobe.engine.core.records import Finding
from trainprobe.watching import Probe

STEPS = 240


class Classifier(Loop):
    """A wide MLP on five clusters; optimizers and schedules vary."""

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))

    def batch(self, step: int, micro: int) -> Batch:
        """Draw points."""
        kinds = torch.randint(0, 5, (16,), generator=self.data)
        return torch.randn(16, 12, generator=self.data) + kinds[:, None], kinds

    def clip(self, step: int) -> Tensor | None:
        """Clip nothing."""
        return None


class WithAdafactor(Classifier):
    """Adafactor."""

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.Adafactor(self.model.parameters(), lr=1e-2)


class WithAdagrad(Classifier):
    """Adagrad, a rate that is cut in steps."""

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.Adagrad(self.model.parameters(), lr=5e-2)

    def make_scheduler(self) -> Any:
        """Cut it."""
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 60, 0.3)


class WithLion(Classifier):
    """Lion, no schedule."""

    def make_optimizer(self) -> Any:
        """Make it."""
        return Lion(self.model.parameters(), lr=1e-3)

    def schedule(self, step: int) -> None:
        """Keep the rate."""


class WithRestarts(Classifier):
    """AMSGrad with warm restarts, gradients clipped by value."""

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)

    def make_scheduler(self) -> Any:
        """Restart each fifty steps."""
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 50)

    def clip(self, step: int) -> Tensor | None:
        """Clip each element."""
        nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        return None


class OneCycle(Classifier):
    """SGD with one cycle of rate and momentum, labels a tenth of which are wrong, a parameter group without decay."""

    def make_optimizer(self) -> Any:
        """Decay matrices alone."""
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 1e-2}, {"params": vectors}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def make_scheduler(self) -> Any:
        """One cycle."""
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=STEPS + 1)

    def batch(self, step: int, micro: int) -> Batch:
        """Spoil some labels."""
        x, y = super().batch(step, micro)
        wrong = torch.rand(len(y), generator=self.data) < 0.1
        return x, torch.where(wrong, torch.randint(0, 5, y.shape, generator=self.data), y)


class SameBatches(Classifier):
    """Four batches over and over, until they are known by heart; no warm-up."""

    def batch(self, step: int, micro: int) -> Batch:
        """Draw one of them."""
        if step % 4 == 0:
            self.data.manual_seed(self.data_seed())
        return super().batch(step, micro)

    def schedule(self, step: int) -> None:
        """Keep the rate."""


class Frozen(Classifier):
    """The first layer is frozen, and clipping lets the norm be reported."""

    def build(self) -> nn.Module:
        """Freeze it."""
        model = super().build()
        model[0].requires_grad_(False)
        return model

    def make_optimizer(self) -> Any:
        """Own the rest."""
        return torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)

    def clip(self, step: int) -> Tensor | None:
        """Clip by norm."""
        return Loop.clip(self, step)


class LayerDrop(Classifier):
    """A residual network in which each block is left out now and then."""

    def build(self) -> nn.Module:
        """Make blocks."""
        return Skipping()


class Skipping(nn.Module):
    """Blocks of which each runs with a probability of 0.7."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 32), nn.Linear(32, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 12] to [batch, 5]."""
        x = self.enter(x)
        for block in self.blocks:
            if not self.training or float(torch.rand(())) < 0.7:
                x = x + block(x)
        return self.leave(x)


class Checkpointed(Averaged):
    """A GPT whose blocks run again in the backward pass, under bfloat16."""

    def build(self) -> nn.Module:
        """Checkpoint each block."""
        model = super().build()
        for block in model.blocks:
            block.forward = self.again(block.forward)
        return model

    def again(self, forward: Any) -> Any:
        """Wrap a forward."""
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def quiet(self, step: int, micro: int) -> Any:
        """Run in bfloat16."""
        return torch.autocast("cpu", torch.bfloat16)


class Text(Averaged):
    """A GPT on real text, two sequences a step, without warm-up or clipping."""

    corpus = read_corpus(200_000)

    def build(self) -> nn.Module:
        """Make a byte-level model."""
        model = super().build()
        model.wte, model.wpe, model.head = nn.Embedding(256, 16), nn.Embedding(32, 16), nn.Linear(16, 256, bias=False)
        for p in (model.wte.weight, model.wpe.weight):
            nn.init.normal_(p, std=0.02)
        return model

    def batch(self, step: int, micro: int) -> Batch:
        """Draw text."""
        x, y = draw_batch(self.corpus, self.data_seed() + step, 2, 32)
        return torch.from_numpy(x), torch.from_numpy(y)

    def clip(self, step: int) -> Tensor | None:
        """Clip nothing."""
        return None

    def after(self, step: int) -> None:
        """Evaluate nothing."""


class Brain(Classifier):
    """A bfloat16 model whose own weights are stepped, without masters; the rate stays, or updates would round away."""

    def schedule(self, step: int) -> None:
        """Keep the rate."""

    def build(self) -> nn.Module:
        """Make it."""
        return super().build().bfloat16()

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Cast the data."""
        return self.called(x.bfloat16()).float()


class Regressor(Classifier):
    """Mean squared error of an autoencoder with a bottleneck, RMSprop, evaluations."""

    def build(self) -> nn.Module:
        """Make the model."""
        return nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 3), nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 12))

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.RMSprop(self.model.parameters(), lr=1e-3, momentum=0.5)

    def batch(self, step: int, micro: int) -> Batch:
        """The target is the input."""
        x, _ = super().batch(step, micro)
        return x, x

    def loss(self, step: int, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(out, y)

    def after(self, step: int) -> None:
        """Evaluate at each tenth step."""
        if step % 10 == 9:
            self.model.eval()
            with torch.no_grad():
                self.model(torch.ones(2, 12))
            self.model.train()


class Adversarial(Pair):
    """Two networks that play against each other; each loss leaves gradients in the other, which are cleared unused."""

    def build(self) -> nn.Module:
        """Make generator and critic."""
        critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        return nn.ModuleList([nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12)), critic])

    def make_optimizer(self) -> Any:
        """Make one for each."""
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in self.model]

    def step(self, step: int) -> None:
        """One update of the critic, and of the generator at each second step."""
        makes, judges = self.model
        real, _ = self.batch(step, 0)
        made = makes(torch.randn(8, 4))
        self.optimizer[1].zero_grad()
        lost = functional.softplus(-judges(real)).mean() + functional.softplus(judges(made.detach())).mean()
        lost.backward()
        self.optimizer[1].step()
        if step % 2 == 0:
            self.optimizer[0].zero_grad()
            functional.softplus(-judges(made)).mean().backward()
            self.optimizer[0].step()
        if self.probe:
            self.probe.note("loss", lost.detach())


class Accumulated(Vision):
    """Four micro-batches a step, Adam, gradients averaged."""

    micro = 4

    def make_optimizer(self) -> Any:
        """Make it."""
        return torch.optim.NAdam(self.model.parameters(), lr=2e-3)


KINDS: dict[str, type[Loop]] = {
    "vision": Vision, "recurrent": Recurrent, "averaged": Averaged, "masters": Masters, "pair": Pair, "closure": Closure,
    "adamw": Classifier, "adafactor": WithAdafactor, "adagrad": WithAdagrad, "lion": WithLion, "restarts": WithRestarts,
    "one cycle": OneCycle, "same batches": SameBatches, "frozen": Frozen, "layer drop": LayerDrop, "checkpointed": Checkpointed,
    "text": Text, "brain": Brain, "regressor": Regressor, "gan": Adversarial, "accumulated": Accumulated,
    "patches": Patches, "streamed": Streamed, "diffusion": Diffusion, "distilled": Distilled, "translator": Translator,
    "routed": Routed, "scaled twice": ScaledTwice, "main gradients": MainGradients, "policy": Policy, "sixteen": Sixteen,
    "padded": Padded, "adapters": Adapters,
}  # fmt: skip


def alarms(kind: str, seed: int, steps: int = STEPS, every: int | None = None) -> list[Finding]:
    """Train and return the warnings and errors. every: of the audit, by default as its relations say."""
    run = type(kind, (KINDS[kind],), {"seed": seed, "steps": steps, "begins": steps + 1, "restarts": steps + 1})
    kept: list[Probe] = []
    plan = {"level": "off", "sinks": [], "monitor": True, "audit": {"every": every} if every else True}

    def probe_of(model: Any, optimizer: Any, place: Any) -> Probe:
        kept.append(Probe(plan, output=folder / "out", on_existing="replace").open(model, optimizer))
        return kept[-1]

    with tempfile.TemporaryDirectory(prefix="trainprobe_healthy_") as name:
        folder = Path(name)
        run(0, 1, probe_of).run()
        kept[0].close()
        return [f for f in kept[0].findings if f.severity in ("warning", "error")]


def main(
    seeds: Annotated[int, typer.Option(help="how many of each kind")] = 2,
    first_seed: Annotated[int, typer.Option(help="the others follow")] = 1000,
    only: Annotated[list[str] | None, typer.Option(help="kinds")] = None,
    every: Annotated[int | None, typer.Option(help="of the audit; left out: its own intervals")] = None,
    steps: Annotated[int, typer.Option(help="of each training")] = STEPS,
) -> None:
    """Print one line a training and what it was told; the exit code is 1 when there was an alarm."""
    torch.set_num_threads(1)
    runs = told = 0
    for kind in only or KINDS:
        for seed in range(first_seed, first_seed + seeds):
            began = time.perf_counter()
            found = alarms(kind, seed, steps, every)
            print(f"{kind:16} {seed:6} {time.perf_counter() - began:6.1f} s  {len(found)} alarms")
            for f in found:
                print(f"    step {f.step} {f.rule}: {f.message}")
            runs, told = runs + 1, told + bool(found)
    print(f"{told} of {runs} healthy trainings with an alarm")
    raise typer.Exit(1 if told else 0)


if __name__ == "__main__":
    typer.run(main)
