"""Weight matrices whose rows, and those of whose gradients, are all the same numbers, looked at where they are."""

from __future__ import annotations

from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.relations.equal_rows import EqualMatrices

_ROWS = 32  # of each matrix that are looked at, spread over it
_LEAST = 4  # numbers that are compared with those of the first row: fewer may be close by chance
_OF_WEIGHTS, _OF_GRADIENTS = 1e-3, 1e-2  # of the largest number: sums over the same numbers round, and updates add that up


class EqualRows(Observer):
    """Looks at every trainable parameter of two dimensions or more, once in a step that asks for it."""

    only_when_due = True

    def forget(self) -> None:
        """Forget the last step."""
        self._looked = False
        self._names: list[str] = []
        self._deferred: list[Deferred] = []

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """Compare the first row of each matrix, and of its gradient, with others of it, once in a step."""
        if self._looked:
            return
        names, self._looked = self._audited.names(), True
        chosen = {id(p): p for p in parameters_in(self._audited.models) if id(p) in names and _is_matrix(p)}
        self._names = [names[key] for key in chosen]
        with without_dispatch(), torch.no_grad():
            for p in chosen.values():
                equal = _spread(p.detach(), _OF_WEIGHTS) & _spread(p.grad, _OF_GRADIENTS)
                self._deferred.append(tape.defer(equal.float().reshape(1)))

    def facts(self, step_data: StepData) -> EqualMatrices:
        """Return the parameters whose rows are all equal."""
        pairs = zip(self._names, self._deferred, strict=True)
        found = tuple(name for name, deferred in pairs if deferred.numbers is not None and float(deferred.numbers[0]) == 1)
        self.forget()
        return EqualMatrices(found)


def _spread(t: Any, share: float) -> Any:
    """Return whether no row is further from the first than that share of the largest number, as a tensor."""
    rows = t[:: max(1, t.shape[0] // _ROWS)]
    return (rows - rows[:1]).abs().amax() <= share * rows.abs().amax()


def _is_matrix(p: Any) -> bool:
    if type(p) is not torch.nn.Parameter or not p.requires_grad or type(p.grad) is not torch.Tensor:
        return False
    plain = p.layout is torch.strided and p.grad.layout is torch.strided and p.is_floating_point() and p.device.type != "meta"
    return plain and p.dim() >= 2 and p.shape[0] >= 2 and p.numel() - p[0].numel() >= _LEAST
