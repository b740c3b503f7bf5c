"""Learning-rate schedulers, learned from their own `step`: how often each was stepped, and the rate that it declares.

What a scheduler that drives others (one after the other, or several at once) steps within its own step is not counted, and the
rates of those that it drives are not theirs alone to declare.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from trainprobe.engine.facts import Schedule
from trainprobe.engine.guard import Guard
from trainprobe.engine.taps.replaced import Replaced

_DRIVERS = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)


class ScheduleWatch:
    """Counts the steps of every scheduler of this process between `start` and `stop`; costs nothing where none is stepped."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._taken: dict[int, tuple[int, int, tuple[float, ...], tuple[float, ...]]] = {}
        self._since: dict[int, int] = {}  # how often each was stepped since the last update that was looked at
        self._driven = 0  # how many steps of drivers are running
        self._replaced: list[Replaced] = []

    def start(self) -> None:
        """Begin to count."""
        if not self._replaced:
            self._replaced = [Replaced(kind, "step", self._counted(kind)) for kind in (LRScheduler, *_DRIVERS)]

    def _counted(self, kind: Any) -> Any:
        original, drives = kind.step, int(kind in _DRIVERS)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if not step.ended and not self._driven:  # type: ignore[attr-defined]
                self._guard.run(self._count, scheduler)
            self._driven += drives
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._driven -= drives

        return step

    def _count(self, scheduler: Any) -> None:
        if getattr(scheduler, "_step_count", 1) == 0 or getattr(scheduler, "_is_initial", False):
            return  # the call that every scheduler makes when it is made
        reference, advances = self._known.get(id(scheduler), (weakref.ref(scheduler), 0))
        self._known[id(scheduler)] = (reference, advances + 1)
        self._since[id(scheduler)] = self._since.get(id(scheduler), 0) + 1

    def stop(self) -> None:
        """Put the originals back."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced = []

    def at_update(self, optimizer: Any) -> None:
        """Take down where the schedulers of an optimizer stand, what they declare, and what the optimizer is about to use."""
        used = tuple(float(group["lr"]) for group in optimizer.param_groups if isinstance(group.get("lr"), float | int))
        mine = [s for s in self._alive() if s.optimizer is optimizer]
        for scheduler in mine:
            rates = _declared(scheduler) if len(mine) == 1 else ()
            self._taken[id(scheduler)] = (_position(scheduler), self._since.pop(id(scheduler), 0), rates, used)

    def take(self) -> tuple[Schedule, ...]:
        """Return what was counted and taken down since the last call."""
        out: list[Schedule] = []
        for scheduler in self._alive():
            reference, advances = self._known[id(scheduler)]
            self._known[id(scheduler)] = (reference, 0)
            position, between, rates, used = self._taken.get(id(scheduler), (_position(scheduler), 0, (), ()))
            out.append(Schedule(type(scheduler).__name__, advances, position, rates, used, between))
        self._taken.clear()
        return tuple(out)

    def positions(self) -> dict[str, int]:
        """Return class of each scheduler that was stepped → where it stands; of several of one class, the one farthest on."""
        out: dict[str, int] = {}
        for scheduler in self._alive():
            kind = type(scheduler).__name__
            out[kind] = max(_position(scheduler), out.get(kind, 0))
        return out

    def _alive(self) -> list[Any]:
        for key in [key for key, (reference, _) in self._known.items() if reference() is None]:
            del self._known[key]
            self._since.pop(key, None)
        return [reference() for reference, _ in self._known.values()]


def _position(scheduler: Any) -> int:
    """Return where a scheduler stands; of one that drives several at once, where the first of them does."""
    position = getattr(scheduler, "last_epoch", None)
    return int(scheduler._schedulers[0].last_epoch if position is None else position)


def _declared(scheduler: Any) -> tuple[float, ...]:
    """Return the rates of a scheduler at its position, where they are a function of that alone; otherwise nothing."""
    if type(scheduler) is lr_scheduler.LambdaLR:
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return tuple(float(base * rule(scheduler.last_epoch)) for base, rule in pairs)
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if closed is not None and type(scheduler).__module__ == lr_scheduler.__name__:
        return tuple(float(rate) for rate in closed())
    return ()
