"""How often optimizers step in an audited step, and between one and the next."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.capture.patching.step_hooks import StepListener
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.updates import UpdateCounts
from trainprobe.monitor.audit.observers import Audited, Observer


class Updates(Observer):
    """Counts; and sees whether one parameter is in two updates of a step."""

    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._between = 0  # updates since the last step that was listened to
        self._listener: StepListener | None = None

    def start(self) -> None:
        """Count the updates between audited steps too."""
        self._listener = self._listener or StepListener(lambda optimizer, args, kwargs: self._count_between())

    def forget(self) -> None:
        """Forget the last step."""
        self._count, self._repeated = 0, False
        self._held: set[int] = set()  # ids of what an optimizer of this step holds

    def steps(self, optimizer: Any) -> None:
        """See what it holds."""
        held = {id(p) for p in parameters_of(optimizer)}
        self._repeated |= bool(held & self._held)
        self._held |= held

    def stepped(self) -> None:
        """Count."""
        self._count += 1

    def facts(self, step_data: StepData) -> UpdateCounts:
        """Return the counts."""
        between, self._between = self._between, 0
        return UpdateCounts(self._count, self._repeated, between)

    def stop(self) -> None:
        """Count no more."""
        if self._listener is not None:
            self._listener.remove()
            self._listener = None

    def _count_between(self) -> None:
        self._between += self._audited.tape is None
