"""Settings of the audit; true for its defaults."""

from __future__ import annotations

from trainprobe.engine.program import Making, Program
from trainprobe.monitor.audit.plan import validate as validate

ORDER = 2


def program(making: Making) -> Program:
    """Return the program that checks relations."""
    from trainprobe.monitor.audit.program import AuditProgram

    gather, plan = making.backend.gathering().gather, validate(making.plan.section("audit"))
    if plan.repeat is not None:
        from trainprobe.again.twice import RepeatedStep

        making.made["repeat"] = RepeatedStep(making, plan.repeat)
    return AuditProgram(plan, making.parts.audit, making.schedules["audit"], gather)
