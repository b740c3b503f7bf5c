"""The gradient is the gradient: what autograd returns is the slope of the loss, by central differences."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainprobe.engine.capture.step_gradients import dot
from trainprobe.engine.capture.step_modes import ROUNDING
from trainprobe.engine.core.guard import attempt
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.report import Line, broken, by_design, holds, not_applicable
from trainprobe.preflight.subject import Seen, Subject

STEPS = 1e-3, 4e-3, 1.6e-2  # of the central differences, relative to the size of each weight
WIDE = "float64"
FINE = 1e-7, 1e-9  # the same in float64, of a loss that is bent within the others
SHARE = 2e-3  # of the gradient's size along a direction that may be wrong
ALONG = 4.0  # how far the gradient's is in a direction, in multiples of what a random one is along any other


def examine(subject: Subject) -> Line:
    """Measure the slope along the gradient and a random direction; where it is not autograd's, find the parameter.

    Along the gradient a slope that is too small shows best. What has no gradient at all shows along the random part alone. Of
    that two must agree, as a loss with kinks has a wrong one now and then.
    """
    if not subject.repeats and subject.beyond(subject.twice):
        return not_applicable("two steps from one state differ: see determinism")
    with _in_float64(subject) as (batch, precision, seen):
        if not seen.finite:
            return not_applicable("the loss is not finite in float64")
        slopes = _Slopes(subject, batch, seen, precision == WIDE)
        wrong = slopes.probe(0) and slopes.probe(1)
        if wrong is None:
            return (
                holds(f"as measured in {precision}")
                if slopes.sharp
                else not_applicable("the loss is not smooth enough to measure")
            )
        name, measured, told = slopes.worst()
    text = f"the loss falls along {name} by {measured:.3g}, autograd says {told:.3g}"
    if rounding := sorted(ROUNDING & subject.base.names.keys()):
        return by_design(f"a straight-through estimator ({rounding[0]}): {text}")
    text = f"{text}; all weights together: {wrong[0]:.4g} for {wrong[1]:.4g}"
    return broken(f"{text}. A part that is detached on purpose does this too", measured=measured, autograd=told)


class _Slopes:
    """Slopes of the loss along random directions."""

    def __init__(self, subject: Subject, batch: Batch, seen: Seen, wide: bool) -> None:
        self.subject, self.batch, self.seen, self.wide = subject, batch, seen, wide
        self.parameters, self.copies = subject.parameters, subject.guard.copies()
        self.sizes = {name: float(p.detach().double().pow(2).mean().sqrt()) or 0.02 for name, p in self.parameters.items()}
        self.sharp, self.seed = False, 0

    def probe(self, seed: int) -> tuple[float, float] | None:
        """Return the measured slope and autograd's along a direction of all weights, where they differ."""
        self.seed = seed
        moved = self.direction()
        told, before = dot(self.seen.gradients, moved), None
        size = sum((float(g.double().norm()) * self.sizes[n]) ** 2 for n, g in self.seen.gradients.items()) ** 0.5
        for step in STEPS:
            slope, rounding = self.slope(moved, step), self.seen.unit / step
            near = abs(slope - told) <= SHARE * size
            error = rounding if near else rounding + abs(slope - before) if before is not None else float("inf")
            if near or (before is not None and abs(before - told) <= 3 * error):
                self.sharp = self.sharp or error < 0.1 * max(size, abs(told))
                return None
            if before is not None and error < 0.05 * abs(before - told):
                self.sharp = True
                bent = self.wide and any(
                    abs(self.slope(moved, fine) - told) <= SHARE * size + self.seen.unit / fine for fine in FINE
                )
                return None if bent else (before, told)  # such as behind a batch norm over two values
            before = slope
        return None

    def direction(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """Return parameter → the direction in which it is moved, of its size, in float32."""
        generator, moved = torch.Generator().manual_seed(self.seed), dict[str, Tensor]()
        for n, p in self.parameters.items():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
            gradient = self.seen.gradients.get(n)
            if gradient is not None and bool(gradient.any()):
                drawn = drawn + ALONG * gradient.double() / gradient.double().norm()
            moved[n] = (drawn * self.sizes[n]).float()
        return {n: moved[n] for n in names or moved}

    def slope(self, moved: dict[str, Tensor], step: float) -> float:
        """Return the central difference of the loss."""
        above, below = (self._loss_at(moved, by) for by in (step, -step))
        self._put(moved, 0.0)
        return (above - below) / (2 * step)

    def _loss_at(self, moved: dict[str, Tensor], step: float) -> float:
        self._put(moved, step)
        self.subject.guard.put_random()
        return self.subject.run(self.batch, rewind=None, backward=False, wide=self.wide).loss

    def _put(self, moved: dict[str, Tensor], step: float) -> None:
        with torch.no_grad():
            for name, direction in moved.items():
                p = self.parameters[name]
                p.copy_(self.copies[id(p)].to(p) + (direction.double() * step).to(p))

    def worst(self) -> tuple[str, float, float]:
        """Return the parameter along which the slope is most wrong, found by halving, and both slopes."""
        names, self.seed = list(self.parameters), 0
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            names = max(halves, key=lambda half: abs(float.__sub__(*self._both(half))))
        return names[0], *self._both(names)

    def _both(self, names: list[str]) -> tuple[float, float]:
        moved = self.direction(names)
        return self.slope(moved, STEPS[0]), dot(self.seen.gradients, moved)


@contextmanager
def _in_float64(subject: Subject) -> Generator[tuple[Batch, str, Seen]]:
    """Give the batch in float64 and its run while the model is in float64, where the loss works so; else both as they are."""
    lack = subject.lack(8 * subject.base.made + 20 * sum(p.numel() for p in subject.parameters.values()))
    seen = batch = None
    subject.guard.rewind()
    if not lack:
        subject.model.double()
        batch = subject.batch.to(torch.float64)
        seen = attempt(lambda: subject.run(batch, rewind=None, wide=True, kept=dict), otherwise=lambda _: None)
    if seen is not None and batch is not None:
        yield batch, WIDE, seen
    else:
        subject.guard.rewind()
        yield subject.batch, f"its own precision{f' (float64 {lack})' if lack else ''}", subject.base
    subject.guard.rewind()
