"""A schedule that anneals the rate is not stepped on beyond its end, where it would raise the rate again.

Relation: a scheduler that goes down to its least rate at one position and up again behind it (`CosineAnnealingLR`, whose end is
`T_max`) and is stepped at every update does not stand at twice that position or more. Tolerance none. Reported as a warning, as
a rate that goes up and down may be meant.
Usually caused by an end that is counted in epochs while the scheduler is stepped at each batch: the rate then goes up and down
every few steps. A scheduler whose end is the end of the training cannot violate this; one that is stepped once an epoch, or
that says that it begins anew (`CosineAnnealingWarmRestarts`), is not judged.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import SchedulerState, Schedules

COST = frozenset({"host"})
OBSERVERS = frozenset({"schedules"})
STAGE = "rate"


def check(evidence: Evidence) -> list[Finding]:
    """Find the first scheduler that is far beyond its end."""
    beyond = next((s for s in evidence.of(Schedules).schedules if _is_beyond(s)), None)
    if beyond is None:
        return []
    text = (
        f"{beyond.kind} is at position {beyond.position} and had annealed the learning rate at {beyond.end}. Stepped at every "
        f"update, it raises the rate and lowers it again every {2 * beyond.end} steps"
    )
    hint = "count T_max in steps of the scheduler: step it once an epoch, or give it all steps of the training"
    return [
        evidence.found(text, "lr", next=hint, measured=float(beyond.position), expected=f"at most {beyond.end}", kind="scalar")
    ]


def _is_beyond(schedule: SchedulerState) -> bool:
    return 0 < 2 * schedule.end <= schedule.position and schedule.advances >= schedule.updates > 0
