"""Calls that clipped gradients by norm, as the tap of parameters learned of them."""

from __future__ import annotations

from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.values import norm_of
from trainprobe.monitor.audit.facts.gradients import Clip, ClippedGradients
from trainprobe.monitor.audit.observers import Observer


class Clips(Observer):
    """See the module text."""

    essential = True

    def facts(self, step_data: StepData) -> ClippedGradients:
        """Return the calls, with the norms that they found."""
        clips = self._audited.states.clips
        return ClippedGradients(tuple(Clip(c.names, norm_of(step_data, c.norm), c.used, c.limit, c.others) for c in clips))
