"""What is told of the first steps of a training: clipped gradients, the loss scale, the learning rates of the schedules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainprobe.engine.capture.step_gradients import dot, relative
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.live_objects import instances_of, with_subclasses
from trainprobe.preflight.subject import Subject

CLIPPED = 1e-4  # how near a norm is to one of two digits that was asked for
SHOWN = 1, 2, 5, 10, 100, 1000  # steps of a schedule


def remarks(subject: Subject) -> Iterator[str]:
    """Yield a sentence of gradients that lie in the model and are clipped, of each scaler, of each schedule in use."""
    given, base = subject.guard.gradients(), subject.base.gradients
    held = {name: given[id(p)] for name, p in subject.parameters.items() if id(p) in given}
    norm, own = dot(held, held) ** 0.5, dot(base, base) ** 0.5
    if 0 < norm < own and relative(norm, float(f"{norm:.2g}")) < CLIPPED:
        yield f"gradients are clipped to the norm {norm:.2g}, from about {own:.3g}"
    top = max((float(g.abs().max()) for g in base.values()), default=0.0) / torch.finfo(torch.float16).max
    for scaler in instances_of(with_subclasses(torch.amp.GradScaler)):
        if scaler.is_enabled():
            scale = scaler.get_scale()
            yield f"with the loss scale {scale:.6g} the largest gradient is {scale * top:.2g} times what float16 holds"
    yield from _schedules(
        {id(o) for o in subject.optimizers if not any(isinstance(g.get("lr"), Tensor) for g in o.param_groups)}
    )


def _schedules(optimizers: set[int]) -> list[str]:
    """Return the rates of each schedule of torch that has one of these optimizers, whose rates are no tensors."""
    alive = instances_of([kind for kind in with_subclasses(LRScheduler) if kind.__module__ == LRScheduler.__module__])
    kept = [
        (scheduler, dict(vars(scheduler))) for scheduler in alive if id(getattr(scheduler, "optimizer", None)) in optimizers
    ]
    inner = {id(part) for scheduler, _ in kept for part in getattr(scheduler, "_schedulers", ())}
    asked = [s for s, _ in kept if id(s) not in inner and not isinstance(s, ReduceLROnPlateau)]
    ahead = [type(s).__name__ for s in asked if s.last_epoch == 1]
    early = [f"{name} has stepped before the first update: its first rate is skipped" for name in ahead]
    try:
        rates = [(type(s).__name__, attempt(_rates, s, otherwise=lambda _: "")) for s in asked]
        return [*early, *(f"learning rates of {name}: {told}" for name, told in rates if told)]
    finally:
        for scheduler, attributes in kept:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)


def _rates(scheduler: LRScheduler) -> str:
    """Return the rates of the next steps; the scheduler and the groups of its optimizer are others then."""
    rates = [scheduler.get_last_lr()[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped
        for _ in range(max(SHOWN)):
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return ", ".join(f"{rates[step - 1]:.3g} in step {step}" for step in SHOWN)
