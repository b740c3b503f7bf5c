"""Fingerprints of the random state at the beginning and the end of a step."""

from __future__ import annotations

from trainprobe.engine.capture.random_state import random_fingerprint
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.calls import RandomFingerprints
from trainprobe.monitor.audit.observers import Audited, Observer


class RandomStates(Observer):
    """Looks at the generators of the host."""

    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._begun = 0

    def begin(self) -> None:
        """Look as the step begins."""
        self._begun = random_fingerprint()

    def facts(self, step_data: StepData) -> RandomFingerprints:
        """Return both, and that of the state of what is split over tp, where a framework keeps one."""
        region = getattr(self._audited.states.source, "random_region", lambda: 0)()
        return RandomFingerprints(self._begun, random_fingerprint(), region)
