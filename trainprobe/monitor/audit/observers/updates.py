"""How often optimizers step in an audited step, and between one and the next; what is updated without one."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.optimizers import live_optimizers, parameters_of
from trainprobe.engine.capture.patching.step_hooks import StepListener
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.observers import Audited, Observer

_LOOKED_AT = 1 << 16  # elements of a parameter that no optimizer holds


class Updates(Observer):
    """Counts; and sees whether one parameter is in two updates of a step."""

    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        self._last = self._by = frozenset[int]()  # ids of the optimizers of the audited step before, and of this one
        super().__init__(guard, audited)
        self._between = 0  # updates since the last step that was listened to
        self._known: WeakSet[Any] = WeakSet()  # optimizers that were there at the start, or have stepped before this step
        self._listener: StepListener | None = None

    def start(self) -> None:
        """Count the updates between audited steps too."""
        self._known.update(live_optimizers())
        self._listener = self._listener or StepListener(lambda optimizer, args, kwargs: self._count_between(optimizer))

    def forget(self) -> None:
        """Forget the last step."""
        self._count, self._repeated = 0, False
        self._last, self._by, self._in_turns = self._by or self._last, frozenset(), True
        self._held: set[int] = set()  # ids of what an optimizer of this step holds
        self._unowned: list[tuple[Any, Any]] = []  # parameters that no optimizer is known to hold, and what they were
        self._moved: dict[str, Any] = {}  # name of each that is not held → whether it moved, on its device

    def first_backward(self) -> None:
        """See what trainable parameters are that no optimizer is known to hold: the program may update them by hand."""
        if self._audited.plain and not in_a_transform():
            held = {id(p) for optimizer in self._audited.optimizers for p in parameters_of(optimizer)}
            beside = (p for p in parameters_in(self._audited.models) if p.requires_grad and id(p) not in held)
            self._unowned = [(p, _elements(p).clone()) for p in beside if _is_plain(p)]

    def steps(self, optimizer: Any) -> None:
        """See what it holds."""
        held = {id(p) for p in parameters_of(optimizer)}
        self._repeated |= bool(held & self._held)
        self._held |= held
        self._by |= {id(optimizer)}
        self._in_turns &= optimizer in self._known
        self._known.add(optimizer)

    def stepped(self) -> None:
        """Count."""
        self._count += 1

    def end(self) -> None:
        """See which of them moved."""
        held, names = {id(p) for optimizer in self._audited.optimizers for p in parameters_of(optimizer)}, self._audited.names()
        with without_dispatch(), torch.no_grad():
            beside = ((names.get(id(p), ""), _elements(p), was) for p, was in self._unowned if id(p) not in held)
            self._moved |= {name: (now != was).any() for name, now, was in beside if now.shape == was.shape}
        self._unowned = []

    def facts(self, step_data: StepData) -> UpdateCounts:
        """Return the counts."""
        between, self._between = self._between, 0
        by_hand = frozenset(name for name, moved in self._moved.items() if moved)
        another = bool(self._last) and self._by != self._last
        return UpdateCounts(self._count, self._repeated, between, by_hand, another, another and self._in_turns)

    def stop(self) -> None:
        """Count no more."""
        if self._listener is not None:
            self._listener.remove()
            self._listener = None

    def _count_between(self, optimizer: Any) -> None:
        if self._audited.tape is None:
            self._between += 1
            self._known.add(optimizer)


def _is_plain(p: Any) -> bool:
    return type(p) in (torch.Tensor, torch.nn.Parameter) and p.layout is torch.strided and not p.is_meta


def _elements(p: Any) -> Any:
    with without_dispatch(), torch.no_grad():
        return p.detach().reshape(-1)[:: max(1, p.numel() // _LOOKED_AT)]
