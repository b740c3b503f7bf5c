"""Which experts of a layer got a gradient, where one parameter holds those of all: [experts, …]."""

from __future__ import annotations

from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.relations.idle_experts import ReachedExperts

_MOST = 1024  # experts of one parameter


class ExpertGradients(Observer):
    """Looks at trainable parameters of three dimensions that are called experts, before the first update of a step."""

    def forget(self) -> None:
        """Forget the last step."""
        self._looked = False
        self._deferred: dict[str, Deferred] = {}

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """Tell for each expert whether its part of the gradient holds anything but zeros."""
        if self._looked:
            return
        names, self._looked = self._audited.names(), True
        with without_dispatch(), torch.no_grad():
            for p in (p for p in parameters_in(self._audited.models) if _holds_experts(names.get(id(p)), p)):
                largest = torch.linalg.vector_norm(p.grad, float("inf"), dim=(1, 2))  # no copy of the gradient
                self._deferred[names[id(p)]] = tape.defer((largest != 0).float())

    def facts(self, step_data: StepData) -> ReachedExperts:
        """Return parameter → whether each of its experts got a gradient."""
        found = {name: tuple(n != 0 for n in d.numbers.tolist()) for name, d in self._deferred.items() if d.numbers is not None}
        self.forget()
        return ReachedExperts(found)


def _holds_experts(name: str | None, p: Any) -> bool:
    plain = type(p) is torch.nn.Parameter and type(p.grad) is torch.Tensor and p.grad.layout is torch.strided
    return plain and name is not None and "expert" in name.lower() and p.dim() == 3 and 2 <= p.shape[0] <= _MOST
