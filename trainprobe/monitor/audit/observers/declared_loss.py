"""The gradient of a loss that the user declares, set against the gradient that is applied; the training does not notice.

The declared loss is a function of the model. It is run on a stand-in that uses the model's own parameters and copies of its
buffers, from the random state in which the step's first forward began; `torch.autograd.grad` leaves `p.grad` alone. Random
state, buffers and gradients are afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.func import functional_call

from trainprobe.engine.capture.random_state import put_back, random_state
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.facts.gradients import Projection, Projections
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls


class StandIn:
    """Looks like the model, shares its parameters, and has buffers of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return functional_call(self._model, self._buffers, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class DeclaredGradient(Observer):
    """Inner products of the applied gradient with that of the declared loss, kept on the device until the step is drained."""

    needs = (ModelCalls,)
    only_when_due = True

    def forget(self) -> None:
        """Forget the last step."""
        self.started: tuple[Any, ...] | None = None
        self._products: list[tuple[str, Deferred]] = []

    def first_forward(self) -> None:
        """Remember the random state in which the step's first forward begins."""
        self.started = random_state()

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """Compare once the gradients of the step are whole; all that records rests while the audit runs the model."""
        if self._audited.tape is None or self._audited.loss is None or len(self._audited.models) != 1:
            return
        inner, names = list(unwrapped(self._audited.models[0]))[-1], self._audited.names()
        pairs = [(names[id(p)], p) for p in inner.parameters() if id(p) in names and p.requires_grad]
        self._audited.asleep = True
        self._audited.pause_others(True)
        try:
            self.compare(inner, pairs)
        finally:
            self._audited.pause_others(False)
            self._audited.asleep = False

    def compare(self, model: Any, parameters: Sequence[tuple[str, Any]]) -> None:
        """Run the declared loss and set its gradient against `p.grad` of these (name, parameter) pairs."""
        loss_of, tape = self._audited.loss, self._audited.tape
        if loss_of is None or self._products or tape is None:
            return
        chosen = [(name, p) for name, p in parameters if p.grad is not None and type(p.grad) is torch.Tensor]
        now = random_state()
        try:
            if self.started is not None:
                put_back(self.started)
            with torch.enable_grad():
                loss = loss_of(StandIn(model))
                found = torch.autograd.grad(loss, [p for _, p in chosen], allow_unused=True)
        finally:
            put_back(now)
        with torch.no_grad():
            for (name, p), declared in zip(chosen, cast("Sequence[Any]", found), strict=True):
                a = p.grad.detach().double().reshape(-1)
                d = torch.zeros_like(a) if declared is None else declared.double().reshape(-1)
                self._products.append((name, tape.defer(torch.stack([a @ a, d @ d, a @ d]))))

    def facts(self, step_data: StepData) -> Projections:
        """Return the inner products."""
        rows = ((name, row.numbers) for name, row in self._products)
        return Projections(tuple(Projection(name, *numbers.tolist()) for name, numbers in rows if numbers is not None))
