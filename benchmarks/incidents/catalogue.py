"""What happens to a training: sixteen incidents, each with what the first line of the tool should name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.incidents.tasks import Batch, Task
from trainprobe.engine.core.records import Finding


class Incident:
    """A healthy training in which something happens from step `begins` on; this one is that training itself.

    within: steps in which it must be found. names: what the first line should be about: loss, rate, layer, gradients, input.
    """

    begins, steps, within, easy, ranks = 150, 220, 12, False, 1
    adam = False
    scaler = False
    names: tuple[str, ...] = ("loss",)

    def rate(self, step: int, base: float) -> float:
        """Return the learning rate of a step."""
        return base

    def batch(self, step: int, task: Task, rank: int) -> Batch:
        """Draw the batch of a step."""
        return task.batch()

    def between(self, step: int, task: Task) -> None:
        """Do something before the step."""

    def gradients(self, step: int, task: Task) -> None:
        """Do something to the gradients."""

    def now(self, step: int) -> bool:
        """Tell whether this is the step."""
        return step == self.begins


class BadBatch(Incident):
    """One batch is bad."""

    def batch(self, step: int, task: Task, rank: int) -> Batch:
        """Spoil it."""
        return task.spoilt() if self.now(step) else task.batch()


class BadBatchNearZero(BadBatch):
    """One batch is bad when the loss is close to 0."""

    easy = True
    begins, steps = 200, 260


class BadShard(BadBatch):
    """Six batches are bad."""

    def now(self, step: int) -> bool:
        """Tell whether this is one."""
        return self.begins <= step < self.begins + 6


class RateJumps(Incident):
    """The rate is a hundred times too high for three steps."""

    names = ("rate",)

    def rate(self, step: int, base: float) -> float:
        """Return it."""
        return base * (100 if self.begins <= step < self.begins + 3 else 1)


class RateStays(Incident):
    """The rate is ten times as high from now on."""

    names = ("rate",)

    def rate(self, step: int, base: float) -> float:
        """Return it."""
        return base * (10 if step >= self.begins else 1)


class RateLeaves(Incident):
    """A warm-up and a cosine; the rate leaves it to five times its peak."""

    names = ("rate",)

    def rate(self, step: int, base: float) -> float:
        """Return it."""
        usual = base * min(1.0, (step + 1) / 20) * 0.5 * (1.05 + math.cos(math.pi * step / self.steps))
        return 5 * base if self.begins <= step < self.begins + 20 else usual


class Overflow(Incident):
    """Gradients of one layer overflow at every step from now on; the scaler skips them all."""

    scaler = True
    names = ("layer", "scale")
    steps = 240
    within = 30

    def gradients(self, step: int, task: Task) -> None:
        """Overflow."""
        if step >= self.begins:
            _grad(task).view(-1)[0] = math.inf


class NanInBatch(Incident):
    """One number of a batch is NaN."""

    names = ("input",)
    within = 2

    def batch(self, step: int, task: Task, rank: int) -> Batch:
        """Spoil it; tokens cannot be NaN, so a row of the embedding is."""
        x, y = task.batch()
        if self.now(step) and x.is_floating_point():
            x.view(-1)[3] = math.nan
        return x, y

    def between(self, step: int, task: Task) -> None:
        """Spoil the embedding."""
        if self.now(step) and isinstance(first := next(iter(task.model.children())), nn.Embedding):
            with torch.no_grad():
                first.weight[:, 0] = math.nan


class LayerWritten(Incident):
    """The weight of one layer is twenty times as large from one step to the next."""

    names = ("layer",)
    factor = 20.0

    def between(self, step: int, task: Task) -> None:
        """Write it."""
        if self.now(step):
            _weight(task).mul_(self.factor)


class LayerLost(LayerWritten):
    """The weight of one layer is drawn anew, small."""

    def between(self, step: int, task: Task) -> None:
        """Write it."""
        if self.now(step):
            _weight(task).normal_(0, 0.01)


class LayerDrifts(LayerWritten):
    """The weight of one layer grows by 2 % a step."""

    begins, steps, within, factor = 110, 260, 120, 1.02

    def now(self, step: int) -> bool:
        """From now on."""
        return step >= self.begins


class SlowDivergence(Incident):
    """The rate grows by 4 % a step."""

    names = ("loss", "rate")
    begins, steps, within = 110, 270, 155

    def rate(self, step: int, base: float) -> float:
        """Return it."""
        return base * 1.04 ** max(0, step - self.begins)


class GradientsGrow(Incident):
    """All gradients grow by 12 % a step, which Adam hides and nothing clips."""

    names = ("gradients",)
    adam = True
    begins, steps, within = 110, 240, 125

    def gradients(self, step: int, task: Task) -> None:
        """Scale them."""
        for p in task.model.parameters():
            if p.grad is not None:
                p.grad *= 1.12 ** max(0, step - self.begins)


class OneGradient(Incident):
    """The gradient of one layer is ten thousand times too large in one step."""

    names = ("layer",)
    adam = True

    def gradients(self, step: int, task: Task) -> None:
        """Scale it."""
        if self.now(step):
            _grad(task).mul_(1e4)


class OneBadRank(BadBatch):
    """The batch of rank 1 is bad, of two."""

    ranks = 2

    def batch(self, step: int, task: Task, rank: int) -> Batch:
        """Spoil it."""
        return task.spoilt() if self.now(step) and rank == 1 else task.batch()


class OneRankRescaled(BadBatch):
    """Rank 1 reads data at another scale for six steps, of two; of the language model, the last token first."""

    ranks = 2
    names = ("loss", "input")

    def batch(self, step: int, task: Task, rank: int) -> Batch:
        """Spoil it."""
        x, y = task.batch()
        if not (self.begins <= step < self.begins + 6 and rank == 1):
            return x, y
        return (10 * x, y) if x.is_floating_point() else (torch.flip(x, (1,)), y)


INCIDENTS: dict[str, type[Incident]] = {
    "bad batch": BadBatch, "bad batch near zero": BadBatchNearZero, "bad shard": BadShard, "rate jumps": RateJumps,
    "rate stays": RateStays, "rate leaves": RateLeaves, "overflow": Overflow, "NaN": NanInBatch, "layer written": LayerWritten,
    "layer lost": LayerLost, "layer drifts": LayerDrifts, "slow divergence": SlowDivergence, "gradients grow": GradientsGrow,
    "one gradient": OneGradient, "one bad rank": OneBadRank, "one rank rescaled": OneRankRescaled,
}  # fmt: skip


@torch.no_grad()
def _weight(task: Task) -> Tensor:
    return task.model.get_parameter(task.layer).data


def _grad(task: Task) -> Tensor:
    grad = task.model.get_parameter(task.layer).grad
    assert grad is not None
    return grad


@dataclass(frozen=True, slots=True)
class Answer:
    """What the tool says of an incident. findings: warnings and errors. first: the first of them."""

    found: bool
    named: bool
    early: int
    findings: int
    first: str


def score(kind: type[Incident], task: type[Task], found: list[Finding]) -> Answer:
    """Judge what was found, causes first."""
    early = [f for f in found if f.step is not None and f.step < kind.begins]
    late = [f for f in found if f not in early]
    in_time = any(f.step is not None and f.step <= kind.begins + kind.within for f in late)
    first = late[0] if late else None
    named = first is not None and any(is_about(word, first, task) for word in kind.names)
    text = f"{first.rule} (step {first.step}): {first.message}" if first else ""
    return Answer(in_time, named and in_time and not early, len(early), len(late), text)


def is_about(word: str, finding: Finding, task: type[Task]) -> bool:
    """Tell whether a finding is about what a word of `names` means."""
    site: Any = finding.site
    name = site.name.lower() if site else ""
    if word == "layer":
        return name in (task.layer, task.layer.rpartition(".")[0])
    if word == "gradients":
        return "gradient" in finding.message or "grad" in name
    if word == "input":
        return "came in" in finding.message or (site is not None and site.slot.startswith(("input", "value")))
    return {"loss": "loss", "rate": "lr", "scale": "loss_scale"}[word] == name.replace(" ", "_")
