"""Says in one line what the audit could judge and does not, because it was not declared."""

from __future__ import annotations

from collections.abc import Callable

from trainprobe.engine.core.records import Finding, StepData
from trainprobe.monitor.audit.audit import Audit
from trainprobe.monitor.audit.facts.gradients import Backwards

_SENTENCE = (
    "Not judged: whether the gradient is that of the whole batch's loss (`probe.declare_loss` makes it known, docs/audit.md)."
)


class Undeclared:
    """A watcher that comes behind the audit. declared: whether the loss is. at_end: takes a sentence for the end of the run."""

    def __init__(self, audit: Audit, declared: Callable[[], bool], at_end: Callable[[str], None]) -> None:
        self._audit = audit
        self._declared = declared
        self._at_end = at_end
        self._silent = False

    def __call__(self, step_data: StepData) -> list[Finding]:
        """Look at the first step that ran backward and at which the relation was due; find nothing."""
        last = self._audit.last
        if self._silent or last is None or last.step != step_data.step or not last.of(Backwards).count:
            return []
        if "declared_loss" in self._audit.plan.due(step_data.step):
            self._silent = True
            if not self._declared():
                self._at_end(_SENTENCE)
        return []
