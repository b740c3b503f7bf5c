"""A run that is resumed goes on with schedule and data where it stood.

Relation: after a load (see `saved_and_loaded`, which tells the save that it was) no scheduler stands before where one of its
class stood at the save; and the first data is not that of the first audited step, where the data of at least three steps
was remembered and all of it differed. Tolerance none.
Usually caused by a scheduler that is left out of the checkpoint, so that the warm-up begins again, or by a data iterator that
is made anew, so that the first part of the data is seen twice and the last never.
"""

from __future__ import annotations

from trainprobe.engine.facts import SavedTensors
from trainprobe.engine.records import Finding
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
EVERY = 10
STAGE = "state"


def check(evidence: Evidence) -> list[Finding]:
    """Find schedules and data that begin again."""
    saved = evidence.resumed
    return [] if saved is None else [*_schedule(evidence, saved), *_data(evidence, saved)]


def _schedule(evidence: Evidence, saved: SavedTensors) -> list[Finding]:
    for schedule in evidence.facts.schedules:
        stood = saved.positions.get(schedule.kind)
        stands = schedule.position if schedule.rates or schedule.actual else schedule.position - schedule.advances
        if stood is None or stands >= stood:
            continue
        text = (
            f"the schedule begins again: {schedule.kind} stands at {stands} after the load, and stood at {stood} when it was "
            f"saved at step {saved.step}"
        )
        hint = "save and load the scheduler with the optimizer"
        return [
            evidence.finding("resumed", text, "lr", measured=float(stands), expected=float(stood), kind="scalar", next=hint)
        ]
    return []


def _data(evidence: Evidence, saved: SavedTensors) -> list[Finding]:
    known = [batches for _, batches in saved.batches]
    now = evidence.facts.batches
    if not evidence.facts.saved or len(known) < 3 or len(set(known)) < len(known) or now != known[0]:
        return []
    text = f"the data begins again: step {evidence.step} after the load trains on what step {saved.batches[0][0]} trained on"
    hint = "save where the data iterator stands, or skip what was seen"
    return [
        evidence.finding(
            "resumed",
            text,
            "batch",
            "input",
            measured="equal",
            expected="different",
            kind="scalar",
            severity="warning",
            next=hint,
        )
    ]
