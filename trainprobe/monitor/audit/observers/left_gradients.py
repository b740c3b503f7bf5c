"""Gradients that were there when the first backward pass of a step began, and that the update then used."""

from __future__ import annotations

from typing import Any

from torch._C import DisableTorchFunction

from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.monitor.audit.capture.values import checksum_of, norm_of
from trainprobe.monitor.audit.facts.gradients import KeptGradients
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts


class LeftGradients(Observer):
    """See the module text. What `zero_grad` clears after that pass is not followed."""

    needs = (BackwardStarts,)
    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._left: dict[str, tuple[Any, Value]] = {}
        self._kept: dict[str, Value] = {}

    def first_backward(self) -> None:
        """Take down the gradients that are there."""
        tape, names = self._audited.tape, self._audited.names()
        if tape is None or not self._audited.plain:
            return
        with DisableTorchFunction():
            for p in parameters_in(self._audited.models):
                if id(p) in names and p.is_leaf and p.grad is not None:
                    self._left[names[id(p)]] = (p.grad, tape.value(p.grad, STATS | CHECKSUM))

    def steps(self, optimizer: Any) -> None:
        """See which of them the optimizer is about to use."""
        if self._audited.of(BackwardStarts).was_cleared:
            return
        names = self._audited.names()
        own = {names[id(p)] for p in parameters_of(optimizer) if id(p) in names}
        others = {names[id(p)] for o in self._audited.optimizers for p in parameters_of(o) if id(p) in names} - own
        mine = {name: left for name, left in self._left.items() if name in own or (not own and name not in others)}
        self._kept |= {name: value for name, (grad, value) in mine.items() if self._still(name, grad)}
        self._left = {name: left for name, left in self._left.items() if name not in mine}

    def facts(self, step_data: StepData) -> KeptGradients:
        """Return fingerprint and norm of each that is not 0."""
        kept = {name: (checksum_of(step_data, v), norm_of(step_data, v)) for name, v in self._kept.items() if v.row >= 0}
        self.forget()
        return KeptGradients({name: seen for name, seen in kept.items() if seen[1] != 0})

    def _still(self, name: str, grad: Any) -> bool:
        """Tell whether the gradient that was there is the tensor that is there now."""
        names = self._audited.names()
        parameters = parameters_in(self._audited.models)
        return any(p.is_leaf and p.grad is grad for p in parameters if names.get(id(p)) == name)
