"""Settings of the audit; true for its defaults."""

from __future__ import annotations

from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.monitor.audit.plan import validate as validate
from trainprobe.run.schedules import Parts, always

ORDER = 2


def program(making: Making) -> Program:
    """Return the program that checks relations."""
    from trainprobe.monitor.audit.program import AuditProgram

    gather, plan = making.backend.gathering().gather, validate(making.plan.section("audit"))
    if plan.repeat is not None:
        from trainprobe.again.twice import RepeatedStep

        making.made["repeat"] = RepeatedStep(making, plan.repeat)
    return AuditProgram(plan, making.parts.audit, making.schedules["audit"], gather)


def schedule(plan: Plan, parts: Parts) -> Schedule:
    """Return when the taps of the audit run."""
    tap, wanted = parts.audit, parts.audit_plan
    assert wanted is not None

    def reads(n: int) -> bool:
        return tap.awaits or wanted.wants(n, "fingerprints")

    taps = ((tap, always), (parts.states, reads), (parts.clipping, always), (parts.scaling, reads), (parts.stepping, always))
    found = tuple((one, wants) for one, wants in taps if one is not None)
    return Schedule(lambda n: tap.awaits or wanted.wants_step(n), found, looks=False)
