"""Modes of the modules as the first backward pass of a step begins: an evaluation after the update changes nothing here."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.set_up import modes_of
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts
from trainprobe.monitor.audit.relations.modes import RestingModel


class TrainingModes(Observer):
    """Looks once in a step; the modes are part of the facts of the model. rests: no module was in training mode as any backward
    pass began.
    """

    needs = (BackwardStarts,)
    essential = True

    def begin(self) -> None:
        """Forget the last step."""
        self._audited.modes = None
        self._rests: bool | None = None

    def first_backward(self) -> None:
        """Look at all modules."""
        if self._audited.tape is not None:
            self._audited.modes = modes_of(self._audited.models)

    def backward_begins(self, root: Any) -> None:
        """See whether any module trains."""
        if self._rests is not False:
            self._rests = not any(module.training for model in self._audited.models for module in model.modules())

    def facts(self, step_data: StepData) -> RestingModel:
        """Return whether none did."""
        return RestingModel(self._rests is True)
