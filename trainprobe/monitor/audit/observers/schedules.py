"""Learning-rate schedulers, learned from their own `step`: how often each was stepped, and the rate that it declares.

What a scheduler that drives others (one after the other, or several at once) steps within its own step is not counted, and the
rates of those that it drives are not theirs alone to declare.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from trainprobe.engine.capture.optimizers import optimizer_of, rates_of, updates_the_same
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.patching.step_hooks import StepListener
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.updates import SchedulerState, Schedules
from trainprobe.monitor.audit.observers import Audited, RunReplacing

_DRIVERS = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)


class _SteppedScheduler:
    """One scheduler. Counts since the last `take`, and since the last update that was looked at (`between`)."""

    def __init__(self, scheduler: Any, stood: int) -> None:
        self.scheduler: weakref.ref[Any] = weakref.ref(scheduler)
        self.stood = stood  # before its first step since the last `take`
        self.advances, self.updates = 0, 0
        self.advances_between, self.updates_between = 0, 0
        self.updated = False  # its optimizer has stepped since the scheduler was first seen
        self.passed_by = False  # another optimizer has updated its optimizer's parameters, with rates of its own
        self.astray = 0  # steps while only that is so

    def advanced(self) -> None:
        """The scheduler was stepped. What it steps before its optimizer does is a program's way to put it where it was."""
        self.astray += self.passed_by and not self.updated
        if self.updated:
            self.advances += 1
            self.advances_between += 1

    def was_updated(self) -> None:
        """Its optimizer has stepped."""
        self.updated = True
        self.updates += 1
        self.updates_between += 1


class ScheduleWatch(RunReplacing):
    """Counts the steps of every scheduler of this process, and those of its optimizer, between `start` and `stop`.

    Costs nothing where no scheduler is stepped. The numbers of the probe's steps are not asked: a run may begin at any.
    """

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._known: dict[int, _SteppedScheduler] = {}
        self._taken: dict[int, SchedulerState] = {}
        self._driven = 0  # how many steps of drivers are running
        self._listener: StepListener | None = None

    def replaced(self) -> Iterator[Replaced]:
        """Count the steps of schedulers."""
        return (Replaced(kind, "step", self._counted(kind)) for kind in (LRScheduler, *_drivers()))

    def _counted(self, kind: Any) -> Any:
        original, drives = kind.step, int(kind is not LRScheduler)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            outer = not step.ended and not self._driven  # type: ignore[attr-defined]
            stood = self._guard.run(_before_its_step, _stepped(scheduler)) if outer else None
            self._driven += drives
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._driven -= drives
                if stood is not None:
                    self._guard.run(self._count, _stepped(scheduler), stood)

        return step

    def _count(self, scheduler: Any, stood: int) -> None:
        if _position(scheduler) == stood:
            return  # a wrapper let it stand: gradients are accumulated
        if self._listener is None:
            self._listener = StepListener(after=lambda optimizer, args, kwargs: self._guard.run(self._updated, optimizer))
        self._known.setdefault(id(scheduler), _SteppedScheduler(scheduler, stood)).advanced()

    def _updated(self, optimizer: Any) -> None:
        for scheduler, known in self._alive():
            if optimizer_of(scheduler) is optimizer:
                known.was_updated()
            elif not known.updated and not known.passed_by:
                known.passed_by = updates_the_same(optimizer, optimizer_of(scheduler))

    def stop(self) -> None:
        """Put the originals back."""
        super().stop()
        if self._listener is not None:
            self._listener.remove()
            self._listener = None

    def steps(self, optimizer: Any) -> None:
        """Take down where the schedulers of an optimizer stand, what they declare, and what the optimizer is about to use."""
        used = rates_of(optimizer)
        mine = [pair for pair in self._alive() if optimizer_of(pair[0]) is optimizer]
        for scheduler, known in mine:
            rates = _declared(scheduler) if len(mine) == 1 else ()
            between = known.advances_between, known.updates_between
            known.advances_between = known.updates_between = 0
            stands, end = _position(scheduler), _end(scheduler)
            self._taken[id(scheduler)] = SchedulerState(_kind(scheduler), 0, stands, rates, used, between=between, end=end)

    def drives(self, optimizer: Any) -> bool:
        """Tell whether a scheduler of an optimizer has been stepped."""
        return any(optimizer_of(scheduler) is optimizer for scheduler, _ in self._alive())

    def facts(self, step_data: StepData) -> Schedules:
        """Return what was counted and taken down since the last call."""
        out: list[SchedulerState] = []
        for scheduler, known in self._alive():
            seen = self._taken.get(id(scheduler)) or SchedulerState(_kind(scheduler), 0, known.stood, (), ())
            astray = 0 if known.updated else known.astray
            out.append(replace(seen, advances=known.advances, updates=known.updates, astray=astray))
            known.advances, known.updates, known.stood = 0, 0, _position(scheduler)
        self._taken.clear()
        return Schedules(tuple(out))

    def positions(self) -> dict[str, int]:
        """Return class of each scheduler that was stepped → where it stands; of several of one class, the one farthest on."""
        out: dict[str, int] = {}
        for scheduler, _ in self._alive():
            kind = _kind(scheduler)
            out[kind] = max(_position(scheduler), out.get(kind, 0))
        return out

    def _alive(self) -> list[tuple[Any, _SteppedScheduler]]:
        alive = {key: (scheduler, known) for key, known in self._known.items() if (scheduler := known.scheduler()) is not None}
        self._known = {key: known for key, (_, known) in alive.items()}
        return list(alive.values())


def _drivers() -> tuple[Any, ...]:
    """Return the classes whose `step` steps others: torch's own, and Accelerate's, which steps one by as many as there are
    processes, because the schedule is one over the batches of a single process.
    """
    wrapper = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    return (*_DRIVERS, wrapper) if wrapper is not None else _DRIVERS


def _stepped(scheduler: Any) -> Any:
    """Return the scheduler inside a wrapper, or the scheduler itself."""
    return scheduler if isinstance(scheduler, LRScheduler) else getattr(scheduler, "scheduler", scheduler)


def _kind(scheduler: Any) -> str:
    return type(scheduler).__name__


def _before_its_step(scheduler: Any) -> int | None:
    """Return where a scheduler stands before a step; None before the one that every scheduler makes when it is made."""
    made = getattr(scheduler, "_step_count", 1) != 0 and not getattr(scheduler, "_is_initial", False)
    return _position(scheduler) if made else None


def _position(scheduler: Any) -> int:
    """Return where a scheduler stands; of one that drives several at once, where the first of them does."""
    position = getattr(scheduler, "last_epoch", None)
    return int(scheduler._schedulers[0].last_epoch if position is None else position)


def _end(scheduler: Any) -> int:
    """Return where a scheduler has reached its least rate and begins to raise it again; 0 where it does not."""
    end = getattr(scheduler, "T_max", 0) if type(scheduler) is lr_scheduler.CosineAnnealingLR else 0
    return int(end) if isinstance(end, float | int) else 0


def _declared(scheduler: Any) -> tuple[float, ...]:
    """Return the rates of a scheduler at its position, where they are a function of that alone; otherwise nothing."""
    if type(scheduler) is lr_scheduler.LambdaLR:
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return tuple(float(base * rule(scheduler.last_epoch)) for base, rule in pairs)
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if closed is not None and type(scheduler).__module__ == lr_scheduler.__name__:
        return tuple(float(rate) for rate in closed())
    return ()
