"""Calls that clipped gradients by norm, as the tap of parameters learned of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.core.facts import Clip
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.values import norm_of
from trainprobe.monitor.audit.observers import Observer


class Clips(Observer):
    """See the module text."""

    essential = True

    def facts(self, step_data: StepData) -> Mapping[str, Any]:
        """Return the calls, with the norms that they found."""
        clips = self._audited.states.clips
        return {"clips": tuple(Clip(c.names, norm_of(step_data, c.norm), c.used, c.limit, c.others) for c in clips)}
