"""Modes of the modules as the first backward pass of a step begins: an evaluation after the update changes nothing here."""

from __future__ import annotations

from trainprobe.engine.capture.audit.observers import Observer
from trainprobe.engine.capture.audit.observers.backward_starts import BackwardStarts
from trainprobe.engine.capture.audit.set_up import modes_of


class TrainingModes(Observer):
    """Looks once in a step; the modes are part of the facts of the model."""

    needs = (BackwardStarts,)
    essential = True

    def begin(self) -> None:
        """Forget the last step."""
        self._audited.modes = None

    def first_backward(self) -> None:
        """Look at all modules."""
        if self._audited.tape is not None:
            self._audited.modes = modes_of(self._audited.models)
