"""What `ReduceLROnPlateau` is given, and how often it lowers the rate: learned from its own `step`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainprobe.engine.capture.optimizers import optimizer_of, rates_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Audited, RunReplacing
from trainprobe.monitor.audit.relations.plateau_direction import Plateau, PlateauSchedulers


class Plateaus(RunReplacing):
    """Watches every scheduler of this kind from its first step on, between `start` and `stop`. One that a checkpoint brought
    back, or whose metric lies on an accelerator, is left out. Costs nothing where none is stepped.
    """

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._known: dict[int, tuple[weakref.ref[Any], Plateau | None]] = {}

    def replaced(self) -> Iterator[Replaced]:
        """Watch each step of such a scheduler."""
        yield Replaced(ReduceLROnPlateau, "step", self._watched(ReduceLROnPlateau.step))

    def facts(self, step_data: StepData) -> PlateauSchedulers:
        """Return what is known of each scheduler."""
        known = self._known.values()
        return PlateauSchedulers(tuple(seen for scheduler, seen in known if seen is not None and scheduler() is not None))

    def drives(self, optimizer: Any) -> bool:
        """Tell whether a scheduler of an optimizer has been stepped."""
        return any(optimizer_of(scheduler) is optimizer for scheduler in self.alive())

    def alive(self) -> list[Any]:
        """Return the schedulers that were stepped."""
        return [found for scheduler, _ in self._known.values() if (found := scheduler()) is not None]

    def _watched(self, original: Any) -> Any:
        def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            if step.ended:  # type: ignore[attr-defined]
                return original(scheduler, metrics, *args, **kwargs)
            before, fresh = rates_of(scheduler.optimizer), not math.isfinite(scheduler.best)
            result = original(scheduler, metrics, *args, **kwargs)
            self._guard.run(self._count, scheduler, metrics, before, fresh)
            return result

        return step

    def _count(self, scheduler: Any, metrics: Any, before: tuple[float, ...], fresh: bool) -> None:
        reference, known = self._known.get(id(scheduler), (None, None))
        met = reference is not None and reference() is scheduler
        metric = _number(metrics)
        if not met and fresh and metric is not None:
            known = Plateau(scheduler.mode, 0, 0, metric, metric, metric)
        elif not met or metric is None:
            known = None
        if known is not None and metric is not None:
            lowered = any(now < was for now, was in zip(rates_of(scheduler.optimizer), before, strict=False))
            bounds = {"low": min(known.low, metric), "high": max(known.high, metric)}
            known = replace(known, calls=known.calls + 1, reductions=known.reductions + lowered, **bounds)
        self._known[id(scheduler)] = weakref.ref(scheduler), known


def _number(metrics: Any) -> float | None:
    plain = isinstance(metrics, float | int) or (isinstance(metrics, torch.Tensor) and metrics.device.type == "cpu")
    return float(metrics) if plain else None
