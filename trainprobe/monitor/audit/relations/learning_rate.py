"""The learning rate is the one that is reported, and follows the declared schedule.

Relation: a torch scheduler advances at most once for each update of its optimizer, and at most once between one update and the
next; the rate in use is the one that the
scheduler (where its rate is a function of its position) or the plan's `schedule` declares for this step; the reported rate is
the rate in use. Floor: 1e-5 of the rate, 1e-12 absolute.
Usually caused by a scheduler that is stepped once a rank or once a micro-batch (accelerate issue 2926), or before the optimizer
where it was behind it, by a rate that is set elsewhere too, or by a report of the rate of the next step.
"""

from __future__ import annotations

from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host"})
EVERY = 10
STAGE = "rate"
_FLOOR = 1e-5


def check(evidence: Evidence) -> list[Finding]:
    """Find rates that leave the schedule."""
    facts = evidence.facts
    passed = max(1, facts.updates) if evidence.before is None else max(1, facts.updates) * max(1, evidence.passed)
    found: list[Finding] = []
    for schedule in facts.schedules:
        if schedule.advances > passed:
            text = (
                f"the learning rate leaves the declared schedule: {schedule.kind} advanced "
                f"{schedule.advances} times for {passed} "
                f"update{'s' if passed > 1 else ''} and stands at {schedule.position}"
            )
            found.append(_finding(evidence, text, float(schedule.advances), float(passed)))
        elif evidence.before is not None and evidence.before.facts.updates and schedule.between > passed:
            text = (
                f"{schedule.kind} advanced {schedule.between} times between the updates of steps {evidence.before.step} and "
                f"{evidence.step}: it is stepped before the optimizer now, so that a rate of the schedule is never used"
            )
            found.append(_finding(evidence, text, float(schedule.between), float(passed)))
        for declared, used in zip(schedule.rates, schedule.actual, strict=False):
            if _apart(used, declared, max(schedule.rates)):
                text = (
                    f"the learning rate {used:.9g} is not the {declared:.9g} that {schedule.kind} "
                    f"declares for position {schedule.position}"
                )
                found.append(_finding(evidence, text, used, declared))
                break
    if evidence.plan.schedule is not None and facts.rates:
        declared = float(evidence.plan.schedule(evidence.step))
        if _apart(facts.rates[0], declared, declared):
            text = (
                f"the learning rate {facts.rates[0]:.9g} is not the {declared:.9g} that the plan declares "
                f"for step {evidence.step}"
            )
            found.append(_finding(evidence, text, facts.rates[0], declared))
    reported = scalar(evidence.scalars, "learning rate")
    if reported is not None and facts.rates and facts.updates and all(_apart(reported, rate, rate) for rate in facts.rates):
        nexts = [rate for schedule in facts.schedules for rate in schedule.rates]
        if not nexts:
            text = f"the reported learning rate {reported:.9g} is not the rate in use, {facts.rates[0]:.9g}"
            found.append(_finding(evidence, text, reported, facts.rates[0], "warning"))
    return found


def _apart(a: float, b: float, size: float) -> bool:
    return abs(a - b) > _FLOOR * abs(size) + 1e-12


def _finding(evidence: Evidence, text: str, measured: float, expected: float, severity: str = "error") -> Finding:
    return evidence.finding(
        "learning_rate",
        text,
        "lr",
        measured=measured,
        expected=expected,
        kind="scalar",
        severity=severity,
        next="step the scheduler once for each optimizer step, on every rank alike",
    )
