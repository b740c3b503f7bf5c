"""Scalars that a program noted as tensors with a gradient: they depend on the weights."""

from __future__ import annotations

from trainprobe.engine.core.records import StepData, Value
from trainprobe.monitor.audit.facts.calls import DependentScalars
from trainprobe.monitor.audit.observers import Observer


class NotedScalars(Observer):
    """Looks as the step ends."""

    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._dependent: frozenset[str] = frozenset()

    def end(self) -> None:
        """Look at what was noted."""
        noted = self._audited.tape.scalars.items() if self._audited.tape is not None else ()
        self._dependent = frozenset(name for name, x in noted if isinstance(x, Value) and x.requires_grad) or self._dependent

    def facts(self, step_data: StepData) -> DependentScalars:
        """Return their names."""
        return DependentScalars(self._dependent)
