"""Gradients of `fully_shard` that were computed and not yet reduced: a backward pass without communication leaves them there.

They stay with the sharded parameter, in torch 2.4 to 2.13 as `unsharded_accumulated_grad` of its `FSDPParam`, or as `grad` of
the unsharded parameter. Where these private fields are not found, nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainprobe.engine.capture.audit.observers import Audited, Observer
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape


class WaitingGradients(Observer):
    """Looks where an optimizer is about to step."""

    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._waiting: dict[str, None] = {}

    def begin(self) -> None:
        """Forget the last step."""
        self._waiting = {}

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """Look at all gradients."""
        self._waiting |= dict.fromkeys(waiting_gradients(self._audited.models, self._audited.names()))

    def facts(self, step_data: StepData) -> Mapping[str, Any]:
        """Return what waited."""
        return {"waiting": tuple(self._waiting)}


def waiting_gradients(models: Sequence[Any], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient waits for a reduction. names: id of parameter → recorded name."""
    held = [p for p in _sharded(models) if id(p.sharded_param) in names]
    return tuple(names[id(p.sharded_param)] for p in held if _waits(p))


def _sharded(models: Sequence[Any]) -> Iterator[Any]:
    for module in (module for model in models if isinstance(model, torch.nn.Module) for module in model.modules()):
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # pyright: ignore[reportCallIssue]
        single = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
        for group in getattr(state, "_fsdp_param_groups", [single] if single is not None else []):
            yield from (p for p in group.fsdp_params if hasattr(p, "sharded_param"))


def _waits(p: Any) -> bool:
    unsharded = getattr(p, "_unsharded_param", None)
    return getattr(p, "unsharded_accumulated_grad", None) is not None or getattr(unsharded, "grad", None) is not None
