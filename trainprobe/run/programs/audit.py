"""Settings of the audit; true for its defaults."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Making, Program, Schedule, always
from trainprobe.engine.taps import Taps
from trainprobe.monitor.audit.plan import validate as validate

ORDER = 2


def program(making: Making) -> Program:
    """Return the program that checks relations."""
    from trainprobe.monitor.audit.program import AuditProgram

    gather, plan = making.backend.gathering().gather, validate(making.plan.section("audit"))
    if plan.repeat is not None:
        from trainprobe.again.conditions.twice import RepeatedStep

        making.made["repeat"] = RepeatedStep(making, plan.repeat, plan.stop)
    return AuditProgram(plan, making.taps.audit(), making.schedules["audit"], gather)


def schedule(plan: Plan, taps: Taps) -> Schedule:
    """Ask for the taps of the audit; return when they run."""
    tap: Any = taps.audit()
    wanted = validate(plan.section("audit"))

    def reads(n: int) -> bool:
        return tap.awaits or wanted.wants(n, "fingerprints")

    asked = (
        (tap, always),
        (taps.states(), reads),
        (taps.clipping(), always),
        (taps.scaling(), reads),
        (taps.stepping(), always),
    )
    found = tuple((one, wants) for one, wants in asked if one is not None)
    return Schedule(lambda n: tap.awaits or wanted.wants_step(n), found, looks=False)
