"""Gradients of `fully_shard` that were computed and not yet reduced: a backward pass without communication leaves them there.

They stay with the sharded parameter, in torch 2.4 to 2.13 as `unsharded_accumulated_grad` of its `FSDPParam`, or as `grad` of
the unsharded parameter. Where these private fields are not found, nothing is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainprobe.engine.core.held_parameters import managed_by
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.relations.cleared_gradients import UnreducedGradients


class WaitingGradients(Observer):
    """Looks where an optimizer is about to step."""

    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._waiting: dict[str, None] = {}

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """Look at all gradients."""
        self._waiting |= dict.fromkeys(waiting_gradients(self._audited.models, self._audited.names()))

    def facts(self, step_data: StepData) -> UnreducedGradients:
        """Return what waited."""
        return UnreducedGradients(tuple(self._waiting))


def waiting_gradients(models: Sequence[Any], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient waits for a reduction. names: id of parameter → recorded name."""
    modules = (module for model in models if isinstance(model, torch.nn.Module) for module in model.modules())
    held = [p for p in managed_by(modules) if id(p.sharded_param) in names]
    return tuple(names[id(p.sharded_param)] for p in held if _waits(p))


def _waits(p: Any) -> bool:
    unsharded = getattr(p, "_unsharded_param", None)
    return getattr(p, "unsharded_accumulated_grad", None) is not None or getattr(unsharded, "grad", None) is not None
