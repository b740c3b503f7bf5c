"""Tensors with a gradient that `all_gather` brought back without one, and that are then multiplied with others that have one.

While a step is audited, the method of process groups that gathers is replaced. Only once it was given a tensor that requires a
gradient, outside of a custom autograd function, are the functions replaced that join and multiply, until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainprobe.engine.capture.graph import parameters_behind
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.cut_off import CutOff, flat
from trainprobe.monitor.audit.observers import Audited, StepReplacing
from trainprobe.monitor.audit.relations.gathered_features import GatheredTensor

_JOINS = ((torch, "cat"), (torch, "concat"), (torch, "stack"), (torch, "vstack"))
_PRODUCTS = (
    *((torch, name) for name in ("matmul", "mm", "einsum")),
    *((Tensor, name) for name in ("__matmul__", "matmul", "mm")),
    (functional, "linear"),
)


class GatheredFeatures(StepReplacing):
    """See the module text."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._cut = CutOff(guard)

    def forget(self) -> None:
        """Forget the last step."""
        self._behind = ""  # a parameter on which what was gathered depends
        self._used = False

    def replaced(self) -> Iterator[Replaced]:
        """Look at what is gathered in a step."""
        if dist.is_available() and dist.is_initialized():
            kind: Any = dist.ProcessGroup
            yield Replaced(kind, "allgather", self._gathering(kind.allgather))

    def end(self) -> None:
        """Put everything back."""
        self._cut.forget()
        super().end()

    def facts(self, step_data: StepData) -> GatheredTensor:
        """Return a parameter that what was gathered depends on, where it was used; otherwise nothing."""
        return GatheredTensor(self._behind if self._used else "")

    def _gathering(self, original: Any) -> Any:
        def gather(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not gather.ended and torch.is_grad_enabled() and len(args) >= 2:  # type: ignore[attr-defined]
                self._guard.run(self._look, args[0], args[1])
            return original(group, *args, **kwargs)

        return gather

    def _look(self, outputs: Any, inputs: Any) -> None:
        given = [t for t in flat(inputs) if t.requires_grad and t.dim() >= 2]
        if not given:
            return
        if not self._behind:
            self._behind = next((name for t in given for name in parameters_behind(t, self._audited.names())), "")
            self._cut.listen(_JOINS, lambda args, result: self._cut.add([result]))
            self._cut.listen(_PRODUCTS, lambda args, result: self._multiplied(result))
        self._cut.add(flat(outputs))

    def _multiplied(self, result: Tensor) -> None:
        self._used |= result.requires_grad
