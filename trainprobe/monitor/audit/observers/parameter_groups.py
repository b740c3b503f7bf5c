"""Learning rates and the other numbers of parameter groups, as an optimizer uses them and as a step leaves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainprobe.engine.capture.optimizers import rates_of
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.set_up import bases_of, optimizer_groups
from trainprobe.monitor.audit.facts.updates import BaseRate, ParameterGroup, UsedGroups
from trainprobe.monitor.audit.observers import Audited, Observer, let
from trainprobe.monitor.audit.observers.plateaus import Plateaus
from trainprobe.monitor.audit.observers.schedules import ScheduleWatch


class ParameterGroups(Observer):
    """See the module text."""

    needs = (Plateaus, ScheduleWatch)
    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._made: dict[int, tuple[float, ...]] | None = None  # id of each optimizer → its rates as the run began

    def start(self) -> None:
        """Take down the rates that the optimizers were made with."""
        if self._made is None and self._audited.optimizers:
            self._made = {id(o): rates_of(o) for o in self._audited.optimizers}

    def forget(self) -> None:
        """Forget the last step."""
        self._rates: tuple[float, ...] = ()
        self._bases: tuple[BaseRate, ...] = ()
        self._groups: dict[int, tuple[ParameterGroup, ...]] = {}  # id of each optimizer that steps → its groups as it steps

    def steps(self, optimizer: Any) -> None:
        """Take down what it is about to use."""
        self._rates += rates_of(optimizer)
        watches = (self._audited.of(Plateaus), self._audited.of(ScheduleWatch))
        unstepped = all(let(self._guard, watch.drives, optimizer) is False for watch in watches)
        self._bases += bases_of(optimizer, len(self._groups), unstepped)
        groups, made = optimizer_groups([optimizer], self._audited.names()), (self._made or {}).get(id(optimizer), ())
        if len(groups) == len(made):
            groups = tuple(replace(group, made=rate) for group, rate in zip(groups, made, strict=True))
        self._groups[id(optimizer)] = groups

    def facts(self, step_data: StepData) -> UsedGroups:
        """Return what was used, and the rates as they are now."""
        return UsedGroups(
            self._used() if self._audited.plain else (),
            self._rates,
            self._bases,
            self._audited.progress(),
            tuple(rate for optimizer in self._audited.optimizers for rate in rates_of(optimizer)),
        )

    def _used(self) -> tuple[ParameterGroup, ...]:
        """Return the groups of all optimizers as they stepped: behind the update a scheduler sets those of the next step."""
        names = self._audited.names()
        used = (self._groups.get(id(o)) or optimizer_groups([o], names) for o in self._audited.optimizers)
        return tuple(group for groups in used for group in groups)
