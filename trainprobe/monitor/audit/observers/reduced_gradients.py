"""Gradients as backward hands them over and as they are used, each as one number: what reduction makes of them is then known.

The number is ⟨g, r⟩ with rᵢ = sin(i / φ), i the place in the tensor: linear in g, and the same weights on every rank. It stays
on the device until the step is drained. No random number is drawn. Nothing is looked at where DistributedDataParallel has
PowerSGD's communication hook, whose reduction is no sum but close to it, or that of local SGD, which reduces in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.unreduced import UnreducedTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.gradients import Reduction, Reductions
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.backward_starts import owned

_STEP = 0.6180339887498949
_APPROXIMATE = tuple(f"torch.distributed.algorithms.ddp_comm_hooks.{kind}_hook" for kind in ("powerSGD", "post_localSGD"))
_BLOCK = 1 << 22  # elements at a time: the factors of a whole embedding would take as much memory again


class ReducedGradients(Observer):
    """Looks at gradients of plain parameters. With a single rank the number is a sum, which tells whether all is finite."""

    only_when_due = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._tap = UnreducedTap(guard, self._arrived, lambda: audited.plain)

    def forget(self) -> None:
        """Forget the last step."""
        self._sums: dict[int, Tensor] = {}
        self._pending: list[tuple[str, Deferred]] = []

    def start(self) -> None:
        """Remember whose gradients to look at."""
        self._tap.open(self._audited.models)

    def begin(self) -> None:
        """Hook the accumulators if this step is due."""
        if self._audited.tape is not None and not any(map(_approximates, self._audited.models)):
            self._tap.begin(self._audited.tape)

    def end(self) -> None:
        """Remove the hooks."""
        self._tap.end()

    def cleared(self, owner: Any) -> None:
        """Forget what no update uses: another model's loss leaves gradients behind, too."""
        for p in owned(owner):
            self._sums.pop(id(p), None)

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """Look at the gradients of these parameters as they are used: whole, and not yet clipped. The first look counts."""
        names, tape = self._audited.names(), self._audited.tape
        if tape is None:
            return
        with torch.no_grad(), DisableTorchFunction():
            for p in parameters:
                arrived = self._sums.pop(id(p), None)
                if arrived is not None and type(p.grad) is Tensor and p.grad.dtype in (torch.float32, torch.float64):
                    row = [arrived, self._number(p.grad), torch.linalg.vector_norm(p.grad, dtype=torch.float64)]
                    self._pending.append((names[id(p)], tape.defer(torch.stack(row))))

    def facts(self, step_data: StepData) -> Reductions:
        """Return what was seen."""
        pending, self._pending = self._pending, []
        return Reductions(tuple(Reduction(name, *row.numbers.tolist()) for name, row in pending if row.numbers is not None))

    def _number(self, t: Tensor) -> Tensor:
        return _product(t) if self._audited.run.world_size > 1 else t.detach().sum(dtype=torch.float64)

    def _arrived(self, p: Any, gradient: Any) -> None:
        if id(p) not in self._audited.names() or type(gradient) is not Tensor or not _is_real(gradient):
            self._sums.pop(id(p), None)
            return
        with torch.no_grad(), DisableTorchFunction():
            number, before = self._number(gradient), self._sums.get(id(p))
            self._sums[id(p)] = number if before is None else before + number


def _approximates(model: Any) -> bool:
    """Tell whether a communication hook of torch makes something else than the sum over all ranks, and is meant to."""
    hooks = [pair for module in model.modules() for pair in vars(module).get("_comm_hooks", ())]
    return any(type(state).__module__ in _APPROXIMATE for _, state in hooks)


def _is_real(t: Tensor) -> bool:
    return t.layout is torch.strided and t.is_floating_point()


def _product(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=t.device)
    for begin in range(0, flat.numel(), _BLOCK):
        piece = flat[begin : begin + _BLOCK].double()
        places = torch.arange(begin, begin + piece.numel(), dtype=torch.float64, device=t.device)
        total += places.mul_(_STEP).sin_() @ piece
    return total
