"""The learning rate in use is the reported one, and follows the declared schedule.

Relation: a torch scheduler advances no more often than its optimizer steps (or the loop, if a step is skipped), in all and
between two updates. Both are counted from the first observed update, so the first step of the run does not matter. The rate in
use is the one that the scheduler declares for its position, if its rate is a function of the position and was in use at an
earlier audited step (a warm-up that is set by hand is not judged). With `schedule` in the plan it is the one for this step. The
reported rate is the rate in use, or the next one. Floor: 1e-5 of the rate, 1e-12 absolute.
Usually caused by a scheduler that is stepped once a rank or once a micro-batch (accelerate issue 2926), or before the optimizer
instead of after it, or by code that sets the rate elsewhere. A scheduler that has always been stepped more often than its
optimizer may be intended: that is a warning.
"""

from __future__ import annotations

from typing import NamedTuple

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import SchedulerState, Schedules, UpdateCounts, UsedGroups
from trainprobe.monitor.scalar_names import scalar

COST = frozenset({"host"})
OBSERVERS = frozenset({"parameter_groups", "schedules", "updates"})
STAGE = "rate"
_FLOOR = 1e-5


def check(evidence: Evidence) -> list[Finding]:
    """Find rates that leave the schedule."""
    found: list[Finding] = []
    for schedule in evidence.of(Schedules).schedules:
        advanced = _too_often(evidence, schedule) or _before_the_optimizer(evidence, schedule)
        found += [finding for finding in (advanced, _not_declared(evidence, schedule)) if finding is not None]
    found += [finding for finding in (_not_planned(evidence), _not_reported(evidence)) if finding is not None]
    return found


class _Schedulers(NamedTuple):
    """Classes of schedulers that were stepped no more often than their optimizer, and those whose declared rate was in use."""

    paced: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()


def remember(evidence: Evidence) -> _Schedulers:
    """Return which schedulers have kept to their optimizer, and which have set its rate."""
    known, seen = _known(evidence), evidence.of(Schedules).schedules
    paced = known.paced | {s.kind for s in seen if 0 < s.advances <= s.updates}
    return _Schedulers(paced, known.followed | {s.kind for s in seen if _follows(s)})


def _known(evidence: Evidence) -> _Schedulers:
    return evidence.remembered("learning_rate", _Schedulers())


def _follows(schedule: SchedulerState) -> bool:
    """Tell whether the rates in use are those that a scheduler declares."""
    pairs = zip(schedule.actual, schedule.rates, strict=False)
    return bool(schedule.rates) and not any(_differs(used, declared, max(schedule.rates)) for used, declared in pairs)


def _steps(evidence: Evidence) -> int:
    """Return how many steps of the loop there were since the audited step before, or since the probe began."""
    return evidence.ordinal if evidence.before is None else evidence.passed


def _too_often(evidence: Evidence, schedule: SchedulerState) -> Finding | None:
    updates = max(schedule.updates, _steps(evidence))
    if schedule.advances <= updates:
        return None
    text = (
        f"{schedule.kind} was stepped {schedule.advances} times for {updates} update{'s' * (updates > 1)} of its optimizer "
        f"and is at position {schedule.position}. The learning rate runs ahead of its schedule"
    )
    changed = schedule.kind in _known(evidence).paced
    if not changed:
        text += ", unless the schedule was made for so many steps"
    hint = "step the scheduler once for each optimizer step, on every rank"
    return _finding(evidence, text, schedule.advances, updates, hint, "error" if changed else "warning")


def _before_the_optimizer(evidence: Evidence, schedule: SchedulerState) -> Finding | None:
    before, (advances, updates) = evidence.before, schedule.between
    most = max(updates, evidence.passed)
    if before is None or not before.of(UpdateCounts).updates or advances <= most:
        return None
    text = (
        f"{schedule.kind} advanced {advances} times between the updates of steps {before.step} and {evidence.step}. It is "
        "stepped before the optimizer now, so one rate of the schedule is never used"
    )
    return _finding(evidence, text, advances, most, "step the scheduler after the optimizer, as at the steps before")


def _not_declared(evidence: Evidence, schedule: SchedulerState) -> Finding | None:
    if not schedule.rates or not schedule.actual or _follows(schedule) or schedule.kind not in _known(evidence).followed:
        return None
    size = max(schedule.rates)
    used, declared = next((u, d) for u, d in zip(schedule.actual, schedule.rates, strict=False) if _differs(u, d, size))
    text = (
        f"the learning rate {used:.9g} is not the {declared:.9g} that {schedule.kind} declares for position "
        f"{schedule.position}, as it was at an audited step before"
    )
    return _finding(evidence, text, used, declared, "look for what else writes to the rate of optimizer.param_groups")


def _not_planned(evidence: Evidence) -> Finding | None:
    if evidence.plan.schedule is None or not evidence.of(UsedGroups).rates:
        return None
    used, declared = evidence.of(UsedGroups).rates[0], float(evidence.plan.schedule(evidence.step))
    if not _differs(used, declared, declared):
        return None
    text = f"the learning rate {used:.9g} is not the {declared:.9g} that the plan declares for step {evidence.step}"
    return _finding(evidence, text, used, declared, "compare the plan's `schedule` with what sets the rate")


def _not_reported(evidence: Evidence) -> Finding | None:
    used = evidence.of(UsedGroups)
    reported = scalar(evidence.scalars, "learning rate")
    known = [
        *used.rates,
        *used.rates_next,
        *(rate for schedule in evidence.of(Schedules).schedules for rate in schedule.rates),
    ]
    if (
        reported is None
        or not used.rates
        or not evidence.of(UpdateCounts).updates
        or not all(_differs(reported, rate, rate) for rate in known)
    ):
        return None
    text = f"the reported learning rate {reported:.9g} is not the rate in use, {used.rates[0]:.9g}"
    return _finding(evidence, text, reported, used.rates[0], "report the rate of optimizer.param_groups", "warning")


def _differs(a: float, b: float, size: float) -> bool:
    return abs(a - b) > _FLOOR * abs(size) + 1e-12


def _finding(evidence: Evidence, text: str, measured: float, expected: float, hint: str, severity: str = "error") -> Finding:
    measured, expected = float(measured), float(expected)
    return evidence.found(text, "lr", next=hint, measured=measured, expected=expected, kind="scalar", severity=severity)
